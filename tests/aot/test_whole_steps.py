"""`jaxinfer plan` compiles whole steps for an H200: KV in place and never copied, bounded temporaries, few kernels."""

import contextlib
import dataclasses
import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.cache.kv_pool import kv_bytes_per_token
from jaxinfer.checkpoint.directory import read_config
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.cli.main import main
from jaxinfer.config import EngineConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3_config import Eagle3Config
from jaxinfer.planning import programs
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import B200, H100, H200
from jaxinfer.planning.hlo import PoolArray, ProgramText
from jaxinfer.planning.plan import PlannedSpeculation
from jaxinfer.planning.programs import BRANCH_LOOP, DECODE_LOOP, DENOISE_LOOP, PREFILL, AbstractEngine
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.sampling.noted import NOTES
from jaxinfer.strategies.draft_options import SpeculativeConfig

CONFIGS = Path(__file__).resolve().parent.parent / "fixtures" / "configs"
# Where depth adds nothing but time, four layers; one model as deep as it is.
DEEP = "qwen3-8b"
LAYERS = {"llama-3.1-8b": 4, "qwen3-0.6b": 4, DEEP: 36}
BF16 = jnp.dtype(jnp.bfloat16)
ROWS, LENGTH = 64, 4096

# What a layer of a decode step may launch.
MOST_KERNELS_PER_LAYER = 10
# And what drawing, choosing, verifying and committing trees may launch besides, with what runs only for rows whose
# draws are bound.
MOST_KERNELS_OF_A_TREE = 380
# What runs only after a mask refused a draw: the output head, what draws are bound to, and the sampler.
MOST_KERNELS_OF_A_SECOND_DRAW = 140
# What runs only where log probabilities are wanted: those of drawn tokens, and their lists in each of a few sizes.
MOST_KERNELS_OF_NOTES = 150


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name == DEEP else [pytest.mark.slow]) for name in LAYERS]
)
def planned(request, tmp_path_factory) -> tuple[ModelConfig, dict[str, Any]]:
    """A model and what the command says of it."""
    directory = tmp_path_factory.mktemp(request.param)
    values = json.loads((CONFIGS / request.param / "config.json").read_text())
    values["num_hidden_layers"] = LAYERS[request.param]
    (directory / "config.json").write_text(json.dumps(values))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        limits = ["--max-num-seqs", str(ROWS), "--max-model-len", str(LENGTH)]
        assert main(["plan", str(directory), "--device", "h200", *limits, "--json"]) == 0
    return read_config(directory)[1], json.loads(output.getvalue())


def most_temporaries(config: ModelConfig, shape: BatchShape) -> int:
    """Bytes that a program may need beside weights and KV.

    Logits are float32, and sampling makes a few arrays of their size: five in all. Of a layer, two residuals and the
    hidden states live, and its widest product (gate and up) in float32, in partial sums and as their result. The rest:
    a few integers for each page of each row.
    """
    logits = 4 * shape.num_logits * config.vocab_size
    residuals = 3 * 4 * shape.num_tokens * config.hidden_size
    products = 3 * 4 * shape.num_tokens * 2 * config.intermediate_size
    pages = 16 * 4 * shape.num_rows * shape.pages_per_row
    return 5 * logits + residuals + products + pages


def test_every_program_is_compiled(planned):
    names = [program["name"] for program in planned[1]["programs"]]
    assert names == [PREFILL, "entry", "prompt_logprobs", DECODE_LOOP, BRANCH_LOOP, "commit_tail"]


def test_every_program_updates_all_of_the_kv_in_place(planned):
    config, plan = planned
    kv_bytes = ROWS * LENGTH * kv_bytes_per_token(config, BF16)
    assert [program["kv_alias_bytes"] for program in plan["programs"]] == [
        kv_bytes, None, None, kv_bytes, kv_bytes, kv_bytes,
    ]  # fmt: skip
    assert plan["kv_alias_bytes"] == plan["kv_bytes"] == kv_bytes


def test_no_program_copies_an_array_of_the_pool(planned):
    assert [program["kv_copies"] for program in planned[1]["programs"]] == [0] * 6
    assert planned[1]["kv_copies"] == 0


def test_no_program_makes_the_gpu_wait_for_the_host(planned):
    waits = {program["name"]: program["host_waits"] for program in planned[1]["programs"]}
    assert waits == dict.fromkeys(waits, 0)
    assert planned[1]["host_waits"] == 0


def test_temporaries_are_those_of_logits_and_activations(planned):
    config, plan = planned
    for program in plan["programs"]:
        if not isinstance(program["shape"], dict):
            continue  # not of steps
        assert 0 < program["temp_bytes"] <= most_temporaries(config, BatchShape(**program["shape"])), program["name"]


def test_a_layer_of_a_decode_step_launches_few_kernels(planned):
    assert 0 < planned[1]["decode_kernels_per_layer"] <= MOST_KERNELS_PER_LAYER


def test_all_of_it_fits(planned):
    _, plan = planned
    assert plan["fits"] is True
    assert plan["weights_bytes"] + plan["kv_bytes"] + plan["temp_bytes"] <= plan["limit_bytes"]


def two_layers(name: str, gpu, rows: int, devices: int = 1):
    """A program of two layers of Qwen3-0.6B, and their configuration."""
    config = dataclasses.replace(read_config(CONFIGS / "qwen3-0.6b")[1], num_layers=2)
    engine = EngineConfig(max_model_len=LENGTH, max_num_seqs=rows, kv_cache_tokens=rows * LENGTH)
    return AbstractEngine(config, engine, compile_target(gpu, devices), dtype=BF16).compile(name), config


@pytest.mark.parametrize(("gpu", "rows"), [(H200, 1), (H100, ROWS), (B200, ROWS)], ids=["one_row", "h100", "b200"])
def test_a_single_row_and_the_other_gpus_are_served_in_place_too(gpu, rows):
    program, config = two_layers(DECODE_LOOP, gpu, rows)
    assert (program.kv_alias_bytes, program.kv_copies) == (rows * LENGTH * kv_bytes_per_token(config, BF16), 0)
    if rows == 1:  # its weights are not copied before it begins: one layer's first projection alone would take this
        heads = config.num_heads + 2 * config.num_kv_heads
        assert program.temp_bytes < 2 * config.hidden_size * heads * config.head_dim


@pytest.mark.parametrize("name", [PREFILL, DECODE_LOOP, "entry"])
def test_counts_of_tokens_are_updated_where_they_lie_and_noting_draws_takes_few_kernels(name):
    config = dataclasses.replace(read_config(CONFIGS / "qwen3-0.6b")[1], num_layers=2)
    limits = EngineConfig(max_model_len=LENGTH, max_num_seqs=ROWS, kv_cache_tokens=ROWS * LENGTH)
    engine = AbstractEngine(config, limits, compile_target(H200), dtype=BF16)
    with engine.target.lowering():
        text = ProgramText(engine.runner.compile(*engine.planned[name]).as_text() or "")
    counts = PoolArray("u16", (ROWS, config.vocab_size), 2)
    assert (text.kv_alias_bytes(counts), text.kv_copies(counts)) == (counts.nbytes, [])
    notes = text.kernels_of_branches(NOTES)
    assert notes == 0 if name == "entry" else 0 < notes <= MOST_KERNELS_OF_NOTES


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("draft_model", "speculative_rounds"),
        ("draft_model", "drafter_catch_up"),
        ("draft_model", PREFILL),
        ("ngram", "speculative_rounds"),
    ],
)
def test_rounds_and_what_feeds_a_drafter_leave_both_caches_in_place_and_never_wait(method, name):
    """Two layers of Qwen3-8B with one of Qwen3-0.6B, whose heads are as many and as large."""
    target = dataclasses.replace(read_config(CONFIGS / "qwen3-8b")[1], num_layers=2)
    drafter = dataclasses.replace(read_config(CONFIGS / "qwen3-0.6b")[1], num_layers=1)
    if method == "ngram":
        drafter = None
    engine = EngineConfig(max_model_len=LENGTH, max_num_seqs=ROWS, kv_cache_tokens=ROWS * LENGTH)
    program = AbstractEngine(
        target, engine, compile_target(H200), dtype=BF16,
        speculation=PlannedSpeculation(SpeculativeConfig(method), drafter),
    ).compile(name)  # fmt: skip
    of_drafter = 0 if drafter is None else kv_bytes_per_token(drafter, BF16)
    kv_bytes = ROWS * LENGTH * (kv_bytes_per_token(target, BF16) + of_drafter)
    assert (program.kv_alias_bytes, program.kv_copies, program.host_waits) == (kv_bytes, 0, 0)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("tree_rounds", 1), ("tree_rounds", 8), ("branch_tree_rounds", 5), ("drafter_catch_up", 8), (PREFILL, 8)],
)
def test_rounds_of_trees_leave_both_caches_in_place_and_never_wait(name, rows):
    """Six layers of Qwen3-8B with a head of the published shape: trees of 60 nodes with the root."""
    target = dataclasses.replace(read_config(CONFIGS / "qwen3-8b")[1], num_layers=6)
    layer = dataclasses.replace(target, architecture="LlamaForCausalLM", num_layers=1, qk_norm=False)
    head = Eagle3Config(layer, 32000, target.hidden_size, capture=(2, 3, 5))
    engine = EngineConfig(max_model_len=LENGTH, max_num_seqs=rows, kv_cache_tokens=rows * LENGTH)
    program = AbstractEngine(
        target, engine, compile_target(H200), dtype=BF16,
        speculation=PlannedSpeculation(SpeculativeConfig("eagle3"), head),
    ).compile(name)  # fmt: skip
    # Trees follow the pages of requests: 70 nodes of a pool in pages of 16.
    tokens = rows * LENGTH + rows * 80
    kv_bytes = tokens * (kv_bytes_per_token(target, BF16) + kv_bytes_per_token(layer, BF16))
    assert (program.kv_alias_bytes, program.kv_copies, program.host_waits) == (kv_bytes, 0, 0)
    if name == "tree_rounds":
        # A layer of the target as in a decode step; of the head, that of the root, of a level and of what was accepted.
        always = program.kernels - program.second_draw_kernels - program.note_kernels
        assert always <= (6 + 3) * MOST_KERNELS_PER_LAYER + MOST_KERNELS_OF_A_TREE
        assert 0 < program.second_draw_kernels <= MOST_KERNELS_OF_A_SECOND_DRAW


@pytest.mark.parametrize("name", [PREFILL, DENOISE_LOOP, "constrained_round"])
def test_rounds_of_denoising_leave_the_cache_in_place_and_never_wait(name):
    """Two layers of Qwen3-8B's shape as an SDAR with blocks of 16, whose logits are what takes most."""
    config = dataclasses.replace(
        read_config(CONFIGS / "qwen3-8b")[1], architecture="SDARForCausalLM", num_layers=2, block_size=16,
        mask_token_id=151669,
    )  # fmt: skip
    engine = EngineConfig(max_model_len=LENGTH, max_num_seqs=ROWS, kv_cache_tokens=ROWS * LENGTH)
    planned = AbstractEngine(config, engine, compile_target(H200), dtype=BF16)
    program = planned.compile(name)
    kv_bytes = ROWS * LENGTH * kv_bytes_per_token(config, BF16)
    assert (program.kv_alias_bytes, program.kv_copies, program.host_waits) == (kv_bytes, 0, 0)
    assert DECODE_LOOP not in planned.planned
    shape = dataclasses.replace(program.shape, num_logits=ROWS * 16, decode_width=16)
    assert 0 < program.temp_bytes <= most_temporaries(config, shape)


# A step's array that devices send each other, where it arrives.
EXCHANGED = re.compile(r" = \w+\[([0-9,]*)\]\S* (?:all|reduce-scatter|collective)[a-z-]*\(")


@pytest.mark.parametrize(("name", "devices"), [(PREFILL, 4), (DECODE_LOOP, 4), (DECODE_LOOP, 16)])
def test_several_gpus_run_the_kernels_on_heads_of_their_own_and_send_no_weights(monkeypatch, name, devices):
    texts = []
    monkeypatch.setattr(programs, "ProgramText", lambda text: texts.append(text) or ProgramText(text))
    program, config = two_layers(name, H200, ROWS, devices)
    kv_bytes = ROWS * LENGTH * kv_bytes_per_token(for_tensor_parallel(config, devices), BF16)
    assert (program.kv_alias_bytes, program.kv_copies) == (kv_bytes // devices, 0)
    # In each layer the attention of every group of rows, the write of K and V, and two norms: nothing fell back.
    groups = 2 if name == PREFILL else 1
    assert texts[0].count('custom_call_target="mosaic_gpu') == 2 * (groups + 3)
    sent = Counter(tuple(map(int, shape.split(","))) for shape in EXCHANGED.findall(texts[0]))
    # The sums of two products a layer and of the embedding, whose words are split. Logits stay where they are: each
    # device takes the maximum, and the candidates, of its own words.
    rows = program.shape.num_logits
    assert sent.pop((program.shape.num_tokens, config.hidden_size)) == 2 * 2 + 1
    assert max(map(math.prod, sent)) <= 64 * rows * devices
