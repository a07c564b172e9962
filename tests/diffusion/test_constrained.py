"""Constrained requests of block-diffusion models get the tokens of a plain loop from left to right with whole masks."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxinfer.cli.show_denoising import BlockHistory
from jaxinfer.constraints import block_walk
from jaxinfer.constraints.block_walk import walk_block
from jaxinfer.constraints.workers import Workers
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.constrained import ConstrainedRound
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.engine import walkers
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.strategy import LandedRounds
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.stand_ins import as_wanted
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerOutput
from jaxinfer.strategies.block_diffusion import BlockDiffusion
from tests.builders import drain, make_request, one_by_one, random_model, random_prompts, run_requests
from tests.constraints.toys import RandomAutomaton, automata
from tests.diffusion import oracle
from tests.diffusion.builders import MASK, diffusion_engine, diffusion_model_config, diffusion_of, generated
from tests.diffusion.builders import requests as free_requests
from tests.diffusion.constrained_oracle import Constrained, constrained

VOCAB, EOS = 101, 99
LOOSE, HALF, TIGHT, RUNS = automata(VOCAB, EOS, seed_of_runs=14)
KINDS: dict[str, dict[str, Any]] = {
    "loose": {"constraint": LOOSE},
    "half": {"constraint": HALF, "temperature": 0.9, "seed": 3},
    "tight": {"constraint": TIGHT, "temperature": 1.2, "seed": 4, "top_p": 0.7},
    "runs": {"constraint": RUNS, "temperature": 0.8, "seed": 5},
    "few": {"constraint": HALF, "temperature": 1.0, "seed": 6, "top_k": 3, "min_p": 0.02},
    "greedy": {"constraint": TIGHT},
    "greedy runs": {"constraint": RUNS},
    "stops": {"constraint": LOOSE, "temperature": 1.0, "seed": 8, "stop_token_ids": list(range(0, 90, 7))},
    "short": {"constraint": HALF, "temperature": 0.7, "seed": 9, "max_tokens": 3},
}


def constrained_requests() -> list[Request]:
    """Prompts that end in and between blocks, and outputs that may."""
    prompts = random_prompts((12, 30, 9, 64, 17, 22, 3, 8, 50), vocab_size=MASK)
    return [
        make_request(name, prompt, **{"max_tokens": 27 - number, "eos_token_ids": [EOS], **kind})
        for number, (prompt, (name, kind)) in enumerate(zip(prompts, KINDS.items(), strict=True))
    ]


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(diffusion_model_config())


@pytest.fixture(scope="module")
def found(model) -> list[Constrained]:
    return [constrained(model, request, oracle.by_threshold(0.1)) for request in constrained_requests()]


@pytest.fixture(scope="module")
def engine(model) -> EngineCore:
    return diffusion_engine(model, kv_cache_tokens=160)


@pytest.fixture
def core(engine) -> EngineCore:
    assert not engine.has_unfinished_requests() and engine.reset_prefix_cache()
    return engine


def outcomes(requests: list[Request]) -> list[tuple[list[int], str]]:
    return [(request.output_token_ids, request.status.value) for request in requests]


def wanted(found: list[Constrained]) -> list[tuple[list[int], str]]:
    return [(one.tokens, one.reason) for one in found]


def test_the_kinds_differ_in_what_they_refuse_and_force(found):
    assert {one.reason for one in found} == {"stop", "length"}
    assert sum(len(one.redrawn_at) for one in found) > 10 and sum(len(one.forced_at) for one in found) > 10
    assert sum(one.num_more for one in found) > 5


def test_a_request_alone_gets_the_tokens_of_the_loop(core, found):
    some = constrained_requests()
    before = core.get_metrics()
    one_by_one(core, some)
    assert outcomes(some) == wanted(found)
    after = core.get_metrics()
    counted = {
        "constraint_forced_tokens_total": sum(len(one.forced_at) for one in found),
        "diffusion_tokens_total": sum(len(one.tokens) for one in found),
        "diffusion_forwards_total": sum(one.num_rounds for one in found),
    }
    assert {name: getattr(after, name) - getattr(before, name) for name in counted} == counted
    refusals = after.constraint_refusals_total - before.constraint_refusals_total
    assert refusals >= sum(len(one.redrawn_at) for one in found)
    marks = [(one.marks.redrawn_at, one.marks.forced_at) for one in some]
    assert marks == [(one.redrawn_at, one.forced_at) for one in found]


def test_requests_together_and_beside_others_get_their_tokens(core, model, found):
    """In a pool too small for all of them, with chunks of prompts beside blocks."""
    launches: list[SchedulerOutput] = []
    core.launch_listeners.append(launches.append)
    free, some = free_requests(), constrained_requests()
    preemptions = core.get_metrics().num_preemptions_total
    run_requests(core, [request for pair in zip_longest(some, free) for request in pair if request is not None])
    core.launch_listeners.remove(launches.append)
    assert outcomes(some) == wanted(found)
    assert [one.output_token_ids for one in free] == [generated(model, one).tokens for one in free_requests()]
    assert core.get_metrics().num_preemptions_total > preemptions
    # Launches of constrained rows have nothing else, and one round.
    of_constrained = [launch for launch in launches if launch.rounds.walks_blocks]
    assert all(set(launch.rounds_of) == {1} for launch in of_constrained)
    assert all(request.guard is not None for launch in of_constrained for request in launch.requests)
    others = [launch for launch in launches if not launch.rounds.walks_blocks]
    rows = [row for launch in others for row in zip(launch.requests, launch.kinds, strict=True)]
    assert not any(request.guard is not None and kind is RowKind.BLOCK for request, kind in rows)
    assert any(launch.then is not None for launch in launches) and max(len(one.requests) for one in of_constrained) > 1


CREDIT = (0.9, 0.3, 0.7)
CONFIGS: dict[str, tuple[DiffusionConfig, oracle.Rule, tuple[float, float, float] | None]] = {
    "hierarchy": (
        DiffusionConfig(unmask="hierarchy", threshold=0.2, low_threshold=0.05),
        oracle.by_hierarchy(0.2, 0.05),
        None,
    ),
    "factor": (DiffusionConfig(unmask="factor", factor=2.5), oracle.by_factor(2.5), None),
    "credit": (
        DiffusionConfig(threshold=0.2, unmask="credit", credit_alpha=0.9, boost_gamma=0.3, decay_beta=0.7),
        oracle.by_threshold(0.2),
        CREDIT,
    ),
    "goes to the end": (DiffusionConfig(threshold=0.1, early_stop=False), oracle.by_threshold(0.1), None),
}


@pytest.mark.parametrize(
    "name", ["credit", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "credit")]
)
def test_rules(name, model, found):
    config, rule, credit = CONFIGS[name]
    # Seats are used again, and a request is preempted: credits begin with a block.
    core = diffusion_engine(model, config, max_num_seqs=2, kv_cache_tokens=88, max_model_len=88)
    some = constrained_requests()
    run_requests(core, some)
    loop = [constrained(model, request, rule, credit) for request in constrained_requests()]
    assert outcomes(some) == wanted(loop)
    if credit is not None:
        assert loop != [constrained(model, request, rule) for request in constrained_requests()]


def test_after_interruptions_the_tokens_are_the_same(core, found):
    some = constrained_requests()
    for request in some:
        core.add_request(request)
    num_steps = 0
    while core.has_unfinished_requests():
        num_steps += 1
        fails = contextlib.ExitStack()
        if num_steps in (3, 8, 29, 50, 71):  # a block begins anew after each of these
            patched = mock.patch.object(core.launcher.scheduler, "update_from_output", side_effect=KeyboardInterrupt)
            fails.enter_context(contextlib.suppress(KeyboardInterrupt))
            fails.enter_context(patched)
        with fails:
            core.step()
    assert outcomes(some) == wanted(found)


class LateWorkers(Workers):
    """Some pieces of work take until the engine no longer waits for them."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self._core, self._num_pieces = core, 0

    def submit_all(self, works):
        return super().submit_all([self.late(work) for work in works])

    def late(self, work):
        self._num_pieces += 1
        seconds = 5.0 * (self._num_pieces in (3, 6, 9))

        def late_work():
            until = time.monotonic() + seconds
            while not self._core.launcher.num_walking and time.monotonic() < until:
                time.sleep(0.001)
            return work()

        return late_work


def test_rows_whose_walks_are_late_land_later(core, found, monkeypatch):
    monkeypatch.setattr(core.launcher._walkers, "_workers", LateWorkers(core))
    some, free = constrained_requests(), free_requests()
    for pair in zip_longest(free, some):
        for request in pair:
            if request is not None:
                core.add_request(request)
    most = 0
    while core.has_unfinished_requests():
        core.step()
        most = max(most, core.launcher.num_walking)
    assert most > 0 and outcomes(some) == wanted(found)


def test_listeners_see_every_round(core):
    (request,) = [request for request in constrained_requests() if request.request_id == "half"]
    request.sampling_params = replace(request.sampling_params, return_blocks=True)
    history, rounds = BlockHistory(), []

    def listen(landed: LandedRounds[DenoiseOutput]) -> None:
        if landed.requests:  # else the launch had chunks of prompts alone
            rounds.extend(history.rounds(landed))

    diffusion_of(core).listeners.append(listen)
    before = core.get_metrics().diffusion_forwards_total
    run_requests(core, [request])
    diffusion_of(core).listeners.remove(listen)
    assert len(rounds) == core.get_metrics().diffusion_forwards_total - before
    known = {one.start + place: token for one in rounds for place, token in enumerate(one.tokens) if token != MASK}
    assert [known[place] for place in range(request.num_prompt_tokens, max(known) + 1)] == [
        request.token_ids[place] for place in range(request.num_prompt_tokens, max(known) + 1)
    ]
    shown = [[MASK if token is None else token for token in block.token_ids] for block in request.blocks]
    first, end = request.num_prompt_tokens, request.max_total_tokens
    assert shown == [list(one.tokens[max(0, first - one.start) : end - one.start]) for one in rounds]
    # From left to right: after a mask come masks alone.
    assert any(MASK in one.tokens for one in rounds)
    assert all(set(one.tokens[one.tokens.index(MASK) :]) == {MASK} for one in rounds if MASK in one.tokens)


def test_a_grammar_that_forces_the_mask_ends_its_request_alone_with_the_reason(core, found):
    only_masks = RandomAutomaton(VOCAB, [EOS], share=0.5, seed=2)
    only_masks.mask = lambda state: np.arange(VOCAB) == MASK  # type: ignore[method-assign]
    failing = make_request("masks", [4, 5], constraint=only_masks)
    beside = constrained_requests()[:2]
    run_requests(core, [failing, *beside])
    assert failing.status.value == "error" and f"allows token {MASK} alone" in str(failing.error)
    assert outcomes(beside) == wanted(found)[:2]


def test_launches_of_constrained_rounds_have_few_shapes_which_warm_up_compiles(model):
    core = diffusion_engine(model, max_num_seqs=100, max_num_batched_tokens=512, kv_cache_tokens=1600)
    (program,) = [program for program in core.runner.programs if isinstance(program, ConstrainedRound)]
    rounds = core.strategy.choose([], 0).constrained
    assert rounds is not None and len(program.shapes) == 4
    for rows in range(1, 101):
        shape = core.strategy.shape_for(rounds, rows=rows, pages_per_row=20, lanes=False, stand_in=as_wanted)
        assert shape in program.shapes and rows <= shape.decode_rows <= max(8 * rows, 1) and shape.pages_per_row >= 20
    editing = diffusion_engine(model, DiffusionConfig(edit_threshold=0.5))
    assert not any(isinstance(program, ConstrainedRound) for program in editing.runner.programs)


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(model, found):
    core = diffusion_engine(model, max_num_seqs=2, max_model_len=96, kv_cache_tokens=160, max_num_batched_tokens=16)
    core.warm_up(progress=False)
    some = constrained_requests()
    run_requests(core, [*some, *free_requests()[:2]])
    assert outcomes(some) == wanted(found)
    assert core.get_metrics().num_compiles_after_warm_up_total == 0


def with_the_mask_of_the_second_place(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_walk._Commits.block

    def bug(self, round_):
        found, guard = block(self, round_), self._guard
        if found.mask is None:
            return found
        token = int(np.flatnonzero(np.unpackbits(found.mask.view(np.uint8), bitorder="little"))[0])
        following = guard.advance(found.state, token)
        return replace(found, mask=guard.mask(following, self._limits.vocab))

    monkeypatch.setattr(block_walk._Commits, "block", bug)


def with_the_noise_of_another_round(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = BlockDiffusion._prepare_constrained

    def bug(self, output, built):
        prepare(self, output, built)
        built.packed["block_round"][:] = built.packed["block_round"] + 1

    monkeypatch.setattr(BlockDiffusion, "_prepare_constrained", bug)


def landing_before_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(guard, block, drawn, limits):
        walk = walk_block(guard, block, drawn, limits)
        if walk.block is None or len(walk.block.tokens) < limits.size or walk.lands:
            return walk
        return walk_block(guard, walk.block, [-1] * limits.size, limits)

    monkeypatch.setattr(walkers, "walk_block", bug)


def counting_the_end_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(guard, block, drawn, limits):
        walk = walk_block(guard, block, drawn, limits)
        return replace(walk, tokens=(*walk.tokens, *walk.tokens[-1:])) if walk.is_complete else walk

    monkeypatch.setattr(walkers, "walk_block", bug)


@pytest.mark.parametrize(
    "bug",
    [
        with_the_mask_of_the_second_place,
        with_the_noise_of_another_round,
        landing_before_the_last_round,
        counting_the_end_twice,
    ],
    ids=lambda bug: bug.__name__,
)
def test_a_planted_bug_is_noticed(bug, model, found, engine, monkeypatch):
    """In the programs of a right engine."""
    some = constrained_requests()
    if bug is counting_the_end_twice:
        some = [request for request, one in zip(some, found, strict=True) if one.tokens[-1] == EOS]
        for request in some:
            request.ending_token_ids = frozenset()  # else the second end is cut
    loop = {request.request_id: one for request, one in zip(constrained_requests(), found, strict=True)}
    expected = [(loop[request.request_id].tokens, loop[request.request_id].reason) for request in some]
    bug(monkeypatch)
    engine.reset_prefix_cache()
    with contextlib.suppress(AssertionError):  # some of the engine's own assertions notice it too
        run_requests(engine, some)
    monkeypatch.undo()
    engine.abort(*[request.request_id for request in some])
    drain(engine)
    engine.reset_prefix_cache()
    assert outcomes(some) != expected
