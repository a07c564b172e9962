"""Comparisons with transformers itself instead of its recorded results, on checkpoints with fresh weights.

Run by `make test-parity`; `PARITY_PYTHON` names another interpreter that has torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_parity.comparison import DEFAULT_PYTHON, Reference, ask_transformers, compare
from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import convert_checkpoint, export_hf, load_checkpoint
from tests.plain_greedy import PlainGreedy

PYTHON = Path(os.environ.get("PARITY_PYTHON", DEFAULT_PYTHON))
LENGTHS = (1, 3, 16, 40, 100)
STEPS = 24
NEAR_TIE = 1e-3

_SIZES = {"vocab_size": 96, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2,
          "max_position_embeddings": 256}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": _LLAMA3}),
    "llama_biases": (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14, "attention_bias": True, "mlp_bias": True,
         "hidden_size": 48, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "qwen2": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": _YARN}),
    "qwen2_dynamic": (
        "qwen2",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True,
         "max_position_embeddings": 48,
         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "qwen3": (
        "qwen3",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12, "hidden_act": "gelu",
         "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "qwen3_biases": (
        "qwen3",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
         "tie_word_embeddings": True, "rope_parameters": _YARN | {"mscale": 0.8, "mscale_all_dim": 1.1}},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    directory: Path
    prompts: list[list[int]]
    theirs: Reference


def random_prompts(seed: int, vocab_size: int = 96) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def make_case(directory: Path, name: str, seed: int, **options: Any) -> Case:
    model_type, fields = CASES[name]
    make = {"model_type": model_type, "fields": _SIZES | fields, "seed": seed} | options
    prompts = random_prompts(seed)
    return Case(directory, prompts, ask_transformers(PYTHON, directory, prompts, STEPS, make))


def assert_agree(ours: list[list[int]], case: Case) -> None:
    for row in compare(case.prompts, ours, case.theirs):
        assert row.verdict(NEAR_TIE) != "DIFFERENT", row


def assert_same_computation(directory: Path, case: Case) -> None:
    """Logits of every position, and greedy tokens, of the plain loop."""
    plain = PlainGreedy(load_checkpoint(directory)[1], case.prompts, STEPS)
    logits = plain.logits()
    for row, (prompt, theirs) in enumerate(zip(case.prompts, case.theirs.logits, strict=True)):
        np.testing.assert_allclose(logits[row, : len(prompt)], theirs, rtol=0, atol=1e-4)
    assert_agree(plain.run()[0], case)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_family_computes_what_transformers_computes(tmp_path, name, seed):
    case = make_case(tmp_path / "hf", name, seed, max_shard_size="30KB" if seed == 2 else None)
    assert_same_computation(case.directory, case)


@pytest.mark.parametrize("name", ["llama", "qwen2_dynamic", "qwen3_biases"])
def test_the_engine_gives_the_tokens_of_transformers_from_converted_shards(tmp_path, name):
    case = make_case(tmp_path / "hf", name, seed=11, max_shard_size="30KB")
    assert len(list(case.directory.glob("*.safetensors"))) > 2
    convert_checkpoint(case.directory, tmp_path / "converted", progress=False)
    llm = LLM(
        tmp_path / "converted", skip_tokenizer_init=True, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128,
        kv_cache_tokens=640,
    )  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in case.prompts],
        SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True),
        use_tqdm=False,
    )
    assert_agree([list(output.outputs[0].token_ids) for output in outputs], case)


@pytest.mark.parametrize("name", ["llama_biases", "qwen2", "qwen3"])
def test_the_format_before_transformers_5_means_the_same(tmp_path, name):
    case = make_case(tmp_path / "hf", name, seed=5, old_format=True)
    assert '"rope_theta"' in (case.directory / "config.json").read_text()
    assert_same_computation(case.directory, case)


def test_a_decoder_saved_without_its_head_is_read_as_transformers_reads_it(tmp_path):
    case = make_case(tmp_path / "hf", "qwen3_biases", seed=6, bare=True)
    assert_same_computation(case.directory, case)


@pytest.mark.parametrize("shard_bytes", [None, 30_000])
@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_from_an_exported_checkpoint(tmp_path, name, shard_bytes):
    case = make_case(tmp_path / "hf", name, seed=7)
    config, model = load_checkpoint(case.directory)
    export_hf(model, config, tmp_path / "exported", max_shard_bytes=shard_bytes)
    theirs = ask_transformers(PYTHON, tmp_path / "exported", case.prompts, STEPS)
    assert_agree(theirs.greedy, case)
    for exported, original in zip(theirs.logits, case.theirs.logits, strict=True):
        # The weights are equal bit for bit, but torch's rounding depends on where in memory they are.
        np.testing.assert_allclose(exported, original, rtol=0, atol=2e-5)
