"""The products of a run: every step is counted, in the shape that it had."""

import pytest

from bench_products import measure, record_steps
from cpu_bench.comparisons import generate, random_requests
from cpu_bench.random_models import qwen3_config, write_random_checkpoint
from jaxinfer import LLM

MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
         "vocab_size": 96}  # fmt: skip
ENGINE = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 48, "kv_cache_tokens": 128}
REQUESTS = {"num_requests": 5, "shortest": 3, "longest": 20}


def test_all_steps_of_a_run_are_counted_and_nothing_stays_wrapped(tmp_path):
    write_random_checkpoint(tmp_path, qwen3_config(**MODEL), seed=0)
    llm = LLM(tmp_path, skip_tokenizer_init=True, dtype="float32", **ENGINE)
    prompts, limits = random_requests(vocab_size=MODEL["vocab_size"], seed=0, **REQUESTS)
    attributes = set(vars(llm.core.runner))
    steps = record_steps(llm, lambda: generate(llm, prompts, limits))
    assert sum(steps.values()) == llm.get_metrics().num_steps_total
    # Each output token but the last of a request goes through a step, as each prompt token does.
    rows = sum(shape.num_tokens * count for shape, count in steps.items())
    assert rows >= sum(map(len, prompts)) + sum(limits) - len(limits)
    assert set(vars(llm.core.runner)) == attributes


def test_the_parts_of_a_measurement_make_its_sum():
    result = measure(MODEL, REQUESTS, ENGINE, rounds=1)
    assert result["products_seconds"] == pytest.approx(
        sum(row["steps"] * row["products_ms"] for row in result["shapes"]) / 1e3
    )
    assert result["run_seconds"] > 0 and all(row["products_ms"] > 0 for row in result["shapes"])
