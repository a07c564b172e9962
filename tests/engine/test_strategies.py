"""A strategy whose launches land an unpredictable number of tokens: the engine gives its requests plain tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.input_batch import BuiltBatch
from jaxinfer.engine.plain_decoding import PlainDecoding
from jaxinfer.engine.strategy import RoundsResult
from jaxinfer.programs.batch_layout import BatchShape, idle_batch, unpack
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import BOUNDS, KV, SEATS, TARGET, Device, Place
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.step import step
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerOutput
from tests.builders import drain, make_request, model_config, random_model, random_prompts, run_requests

MOST_TOKENS = 3
LAUNCHES = "launches"


@dataclass(frozen=True, eq=False)
class Jumps:
    """Rounds of up to MOST_TOKENS decode steps. Which rows take part in which depends on how many launches there were:
    a state that the strategy brings."""

    shapes: Sequence[BatchShape]
    reads = (TARGET,)
    writes = (KV, SEATS, BOUNDS, LAUNCHES)

    @property
    def planned(self) -> dict[str, BatchShape]:
        return {"jumps": self.shapes[-1]}

    def describe(self, shape: BatchShape) -> str:
        return f"jumps for {shape.describe()}"

    def idle(self, shape: BatchShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        batch, launches = unpack(buffer, shape), device.state[LAUNCHES]

        def turn(index, state):
            kv, seats, bounds, tokens = state
            length = seats.length[jnp.maximum(batch.row_seat, 0)]
            takes_part = ((length * 5 + index + launches) % 7 < 3) & (index < MOST_TOKENS * batch.num_steps)
            now = replace(batch, capacity=jnp.where(takes_part, batch.capacity, 0))
            kv, seats, bounds, output, *_ = step(device.models[TARGET], kv, seats, bounds, now, device.backend)
            return kv, seats, bounds, lax.dynamic_update_index_in_dim(tokens, output.token_ids, index, 0)

        turns = 2 * MOST_TOKENS
        tokens = jnp.full((turns, batch.decode_rows), -1, jnp.int32)
        state = (*(device.state[name] for name in (KV, SEATS, BOUNDS)), tokens)
        kv, seats, bounds, tokens = lax.fori_loop(0, turns, turn, state)
        return {KV: kv, SEATS: seats, BOUNDS: bounds, LAUNCHES: launches + 1}, device.readable(tokens)


class Jumping(PlainDecoding):
    def __init__(self, kind: RowKind, programs: EnginePrograms, buckets: Buckets) -> None:
        super().__init__(programs.decode_loop, buckets)
        self.program = Jumps(buckets.all_loops())
        self.programs = [self.program]
        self.loop = programs.decode_loop
        self.rounds = Rounds(kind, most=2, most_tokens=MOST_TOKENS, least_tokens=0, plain=Rounds())

    def launch(self, output: SchedulerOutput, built: BuiltBatch, runner: Runner) -> RoundsResult:
        if output.rounds is self.rounds.plain:
            return RoundsResult(runner.launch(self.loop, built.packed.shape, built.packed.buffer).tokens)
        return RoundsResult(runner.launch(self.program, built.packed.shape, built.packed.buffer))

    def make_state(self) -> dict[str, Any]:
        return {LAUNCHES: jnp.zeros((), jnp.int32)}


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module", params=[RowKind.VERIFICATION, RowKind.BLOCK], ids=lambda kind: kind.value)
def jumping(model, request) -> EngineCore:
    """An engine with a pool too small for all of its requests."""

    def make_strategy(programs: EnginePrograms, buckets: Buckets) -> Jumping:
        return Jumping(request.param, programs, buckets)

    config = EngineConfig(
        max_model_len=160, max_num_seqs=4, max_num_batched_tokens=64, page_size=4, kv_cache_tokens=256
    )
    return EngineCore(model, config, dtype=jnp.dtype(jnp.float32), make_strategy=make_strategy)


def requests() -> list:
    """Greedy and sampled, short and long, one that streams and one whose sampling the host prepares."""
    prompts = random_prompts((60, 64, 9, 100, 70, 30, 1))
    requests = [make_request(str(i), p, max_tokens=24, seed=i, temperature=i % 3 / 2) for i, p in enumerate(prompts)]
    requests.append(make_request("stream", prompts[2], max_tokens=9, stream=True))
    requests.append(make_request("penalty", prompts[4], max_tokens=9, frequency_penalty=0.5))
    return requests


def test_requests_get_the_tokens_of_plain_decoding(jumping, idle_engine):
    plain = run_requests(idle_engine(), requests())
    before = jumping.get_metrics().num_preemptions_total
    assert run_requests(jumping, requests()) == plain
    assert jumping.get_metrics().num_preemptions_total > before
    assert jumping.runner.state[LAUNCHES] > 0, "the strategy had nothing to do"


def test_a_sequence_that_ends_within_a_round_lands_no_more(jumping, idle_engine):
    prompts = random_prompts((20, 33, 47))
    plain = run_requests(idle_engine(), [make_request(str(i), p, max_tokens=20) for i, p in enumerate(prompts)])
    ending = [
        make_request(str(i), p, max_tokens=20, eos_token_ids=[t[7]])
        for i, (p, t) in enumerate(zip(prompts, plain, strict=True))
    ]
    assert run_requests(jumping, ending) == [tokens[: tokens.index(tokens[7]) + 1] for tokens in plain]


def test_nothing_is_written_through_columns_that_a_row_does_not_have(jumping, monkeypatch):
    """After each row's own pages its page table names a page of the test's, which must not change."""
    assert jumping.reset_prefix_cache()
    allocator, batch = jumping.scheduler.kv.allocator, jumping.input_batch
    (canary,) = allocator.allocate(1)
    build = batch.build

    def build_with_stale_columns(output):
        built = build(output)
        columns = np.arange(built.packed.shape.pages_per_row)
        stale = columns >= built.packed["capacity"][:, None] // batch.page_size
        built.packed["page_table"][stale] = canary
        return built

    monkeypatch.setattr(batch, "build", build_with_stale_columns)
    monkeypatch.setattr(jumping, "check_integrity", lambda: None)  # it would miss the test's page
    before = [np.asarray(pages[canary]) for pages in (*jumping.kv.k, *jumping.kv.v)]
    for request in requests():
        jumping.add_request(request)
    drain(jumping)
    after = [np.asarray(pages[canary]) for pages in (*jumping.kv.k, *jumping.kv.v)]
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    allocator.free([canary])
