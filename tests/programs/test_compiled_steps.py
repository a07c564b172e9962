"""Compiled steps read weights without a copy or a transpose, and compute rotary angles once for all layers."""

import itertools
import math

import pytest

from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.planning.hlo import ProgramText
from jaxinfer.programs.batch_layout import BatchShape
from tests.builders import make_engine, model_config, random_model

pytestmark = pytest.mark.optimized

STEPS = {
    "one token": (1, 0),
    "features first": (8, 0),
    "a prefill with features first": (0, 44),
    "features last": (0, 300),
}

WRITES = ("fusion", "copy", "transpose", "convert", "all-gather")


@pytest.fixture(scope="module")
def engine():
    config = model_config("LlamaForCausalLM", num_heads=6, num_kv_heads=2, hidden_size=112, intermediate_size=224)
    return make_engine(random_model(config), max_num_seqs=8, max_num_batched_tokens=512)


@pytest.fixture(scope="module", params=STEPS)
def program(engine, request):
    decode_rows, tokens = STEPS[request.param]
    shape = BatchShape(decode_rows, int(tokens > 0), tokens, engine.buckets.pages_per_row[0])
    return ProgramText(engine.runner.compile(engine.programs.step, shape).as_text())


def test_no_step_copies_or_turns_a_weight_around(engine, program):
    of_kernels = {math.prod(p.shape) for p in parameters(engine.model_config) if p.path.endswith("kernel")}
    assert len(of_kernels) == 5
    for instruction in program.scheduled:
        if instruction.opcode in WRITES:
            # No activation of these steps has as many elements as a kernel.
            assert not of_kernels & {math.prod(shape) for _, shape in instruction.results}, instruction


def test_the_rotary_angles_are_computed_once_for_all_layers(engine, program):
    assert engine.model_config.num_layers > 1
    instructions = itertools.chain.from_iterable(program.computations.values())
    assert sum(instruction.opcode in ("cosine", "sine") for instruction in instructions) == 2
