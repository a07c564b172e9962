"""Whole steps of real models, compiled for an H200: KV in place and never copied, bounded temporaries, few kernels."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxinfer.cache.kv_cache import kv_bytes_per_token
from jaxinfer.checkpoint.directory import read_config
from jaxinfer.cli import main
from jaxinfer.config import EngineConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import B200, H100, H200
from jaxinfer.planning.programs import DECODE, DECODE_LOOP, PREFILL, CompiledProgram, compile_plan, compile_program

CONFIGS = Path(__file__).resolve().parent.parent / "fixtures" / "configs"
MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-8b")
BF16 = jnp.dtype(jnp.bfloat16)
# Depth adds nothing here but time: programs of full depth are compiled in the test of the command.
LAYERS = 4
ROWS, LENGTH = 64, 4096

# Upper limits of what is launched in a decode step, a limit to be lowered with every kernel that is fused away.
MOST_KERNELS_PER_LAYER = 16


def settings(rows: int = ROWS) -> EngineConfig:
    return EngineConfig(max_model_len=LENGTH, max_num_seqs=rows, kv_cache_tokens=rows * LENGTH)


def model(name: str, layers: int = LAYERS) -> ModelConfig:
    return dataclasses.replace(read_config(CONFIGS / name)[1], num_layers=layers)


def kv_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    return engine.kv_cache_tokens * kv_bytes_per_token(config, BF16)


def most_temporaries(config: ModelConfig, program: CompiledProgram) -> int:
    """Bytes that a program may need beside weights and KV.

    Logits are float32, and sampling keeps them, a masked copy and what sorting needs of both: five times the logits.
    Between layers live the residual and the hidden states; within one, at most its widest product (gate and up) in
    float32, cut in two along the sum, and its result. The rest is a few integers for each page of each row.
    """
    shape = program.shape
    logits = 4 * shape.num_logits * config.vocab_size
    residuals = 3 * 4 * shape.num_tokens * config.hidden_size
    products = 3 * 4 * shape.num_tokens * 2 * config.intermediate_size
    pages = 16 * 4 * shape.num_rows * shape.pages_per_row
    return 5 * logits + residuals + products + pages


@pytest.fixture(scope="module", params=MODELS)
def compiled(request) -> tuple[ModelConfig, dict[str, CompiledProgram], float]:
    """The configuration, its programs by name, and the kernels of a layer in decode."""
    config = model(request.param)
    programs, kernels_per_layer = compile_plan(config, settings(), compile_target(H200), dtype=BF16)
    return config, {program.name: program for program in programs}, kernels_per_layer


def test_prefill_decode_and_decode_loop_are_all_compiled(compiled):
    assert set(compiled[1]) == {PREFILL, DECODE, DECODE_LOOP}


def test_every_program_updates_all_of_the_kv_in_place(compiled):
    config, programs, _ = compiled
    in_place = {name: program.kv_alias_bytes for name, program in programs.items()}
    assert in_place == dict.fromkeys(programs, kv_bytes(config, settings()))


def test_no_program_copies_an_array_of_the_pool(compiled):
    assert {name: program.kv_copies for name, program in compiled[1].items()} == dict.fromkeys(compiled[1], 0)


def test_temporaries_are_those_of_logits_and_activations(compiled):
    config, programs, _ = compiled
    over = {
        name: (program.temp_bytes, most_temporaries(config, program))
        for name, program in programs.items()
        if program.temp_bytes > most_temporaries(config, program)
    }
    assert over == {}


def test_a_layer_of_a_decode_step_launches_few_kernels(compiled):
    assert 0 < compiled[2] <= MOST_KERNELS_PER_LAYER


def test_one_row_is_decoded_in_place_too():
    config, engine = model("qwen3-0.6b", layers=2), settings(rows=1)
    program = compile_program(DECODE, config, engine, compile_target(H200), dtype=BF16)
    assert (program.kv_alias_bytes, program.kv_copies) == (kv_bytes(config, engine), 0)


@pytest.mark.parametrize("gpu", [H100, B200], ids=["h100", "b200"])
def test_the_other_gpus_can_be_compiled_for(gpu):
    config, engine = model("qwen3-0.6b", layers=1), settings()
    program = compile_program(DECODE, config, engine, compile_target(gpu), dtype=BF16)
    assert (program.kv_alias_bytes, program.kv_copies) == (kv_bytes(config, engine), 0)


def test_the_command_plans_qwen3_8b_at_full_depth(capsys):
    arguments = ["--device", "h200", "--max-num-seqs", str(ROWS), "--max-model-len", str(LENGTH), "--json"]
    assert main(["plan", str(CONFIGS / "qwen3-8b"), *arguments]) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert plan["fits"] is True
    assert plan["kv_alias_bytes"] == plan["kv_bytes"] == ROWS * LENGTH * 147456
    assert plan["kv_copies"] == 0
    assert 0 < plan["temp_bytes"] < 2e9
    assert 0 < plan["decode_kernels_per_layer"] <= MOST_KERNELS_PER_LAYER
    assert [program["name"] for program in plan["programs"]] == [PREFILL, DECODE, DECODE_LOOP]
    assert shown.err.count("compiling for NVIDIA H200") == 4
