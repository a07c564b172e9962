"""Constrained requests get the tokens of a plain loop with whole masks, in every way of decoding."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxinfer.constraints.guard import walk
from jaxinfer.constraints.workers import Workers
from jaxinfer.engine import walkers
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.seat_entries import SeatEntries
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.bounds import Bounded, of_seats
from jaxinfer.scheduling import refusals as refusals_module
from jaxinfer.scheduling.launch_plan import LaunchPlan
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler import Scheduler
from tests.branching.builders import alone, make_group, run_groups
from tests.builders import make_engine, make_request, model_config, random_model, random_prompts, run_requests
from tests.constraints.late_workers import LateWorkers
from tests.constraints.oracle import constrained_output
from tests.constraints.toys import RandomAutomaton, Turns, automata
from tests.oracle import next_token_logits
from tests.sampling.reference import log_softmax
from tests.speculative.builders import WAYS, engine_of

SLOW = pytest.mark.slow
VOCAB, EOS = 101, 100
LOOSE, HALF, TIGHT, RUNS = automata(VOCAB, EOS)
KINDS: dict[str, dict[str, Any]] = {
    "free": {"temperature": 0.7, "seed": 1},
    "loose": {"constraint": LOOSE},
    "half": {"constraint": HALF, "temperature": 0.9, "seed": 3},
    "tight": {"constraint": TIGHT, "temperature": 1.2, "seed": 4, "top_p": 0.7},
    "runs": {"constraint": RUNS, "temperature": 0.8, "seed": 5},
    "few": {"constraint": HALF, "temperature": 1.0, "seed": 6, "top_k": 3, "min_p": 0.02},
    "penalized": {"constraint": HALF, "frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "biased": {"constraint": LOOSE, "logit_bias": {5: 4.0, 6: 3.0}, "allowed_token_ids": [*range(60), EOS]},
    "looked at": {"constraint": HALF, "logprobs": 2, "temperature": 0.6, "seed": 7},
    "looked at, runs": {"constraint": RUNS, "logprobs": 1, "temperature": 0.8, "seed": 10, "frequency_penalty": 0.3},
    "ends anyway": {"constraint": TIGHT, "ignore_eos": True, "temperature": 0.8, "seed": 32},
    "least": {"constraint": HALF, "min_tokens": 9, "temperature": 1.0, "seed": 8},
    "bad words": {"bad_token_ids": [(7,), *[(a, b) for a in range(0, 101, 3) for b in range(0, 101, 2)]]},
    "bad too": {"constraint": LOOSE, "bad_token_ids": [(1, 2), (3, 4, 5)], "temperature": 1.3, "seed": 9},
}


def requests() -> list[Request]:
    prompts = random_prompts((12, 30, 9, 5, 17, 22, 3, 8, 26, 14, 6, 19, 11, 7))
    return [
        make_request(name, prompt, max_tokens=21, **{"eos_token_ids": [EOS], **kind})
        for prompt, (name, kind) in zip(prompts, KINDS.items(), strict=True)
    ]


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module")
def expected(model) -> dict[str, tuple[list[int], str]]:
    return {request.request_id: constrained_output(model, request) for request in requests() if request.guard}


@pytest.fixture(scope="module")
def engines(model):
    made: dict[str, EngineCore] = {}

    def get(way: str) -> EngineCore:
        if way not in made:
            made[way] = engine_of(way, model, **({} if way == "loops" else {"kv_cache_tokens": 256}))
        return made[way]

    return get


def outcomes(core: EngineCore, made: list[Request]) -> dict[str, tuple[list[int], str]]:
    run_requests(core, made)
    return {one.request_id: (one.output_token_ids, one.status.value) for one in made if one.guard}


def check_logprobs(model: DecoderLM, made: Sequence[Request]) -> None:
    """Drawn and forced tokens have the log probabilities of the model's own distribution."""
    for request in made:
        if request.sampling_params.logprobs is None:
            continue
        expected = []
        for count, token in enumerate(request.output_token_ids):
            known = [*request.prompt_token_ids, *request.output_token_ids[:count]]
            expected.append(log_softmax(next_token_logits(model, known, request.num_prompt_tokens))[token])
        found = [entry[token].logprob for entry, token in zip(request.logprobs, request.output_token_ids, strict=True)]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_kinds_differ_in_how_much_they_refuse(expected):
    ends = [reason for _, reason in expected.values()]
    assert {"stop", "length"} <= set(ends)


@pytest.mark.parametrize("way", WAYS)
def test_constrained_requests_get_the_tokens_of_the_oracle(way, engines, expected, model):
    made = requests()
    assert outcomes(engines(way), made) == expected
    check_logprobs(model, made)


@pytest.fixture
def masks(monkeypatch):
    """(way) -> constrained draws have masks "always", from the first one on, or "never" until one is refused."""

    def choose(way: str) -> None:
        monkeypatch.setattr(refusals_module, "FREQUENT", {"always": -1.0, "never": 2.0}[way])
        monkeypatch.setattr(refusals_module, "SELDOM", {"always": -1.0, "never": 2.0}[way])

    return choose


@pytest.mark.parametrize("when", ["always", "never"])
@pytest.mark.parametrize("way", ["loops", pytest.param("chains", marks=SLOW), "trees"])
def test_tokens_are_those_of_the_oracle_whenever_draws_have_masks(way, when, masks, engines, expected):
    masks(when)
    core = engines(way)
    before = core.get_metrics()
    assert outcomes(core, requests()) == expected
    after = core.get_metrics()
    refused = after.constraint_refusals_total - before.constraint_refusals_total
    dropped = after.constraint_dropped_tokens_total - before.constraint_dropped_tokens_total
    assert refused > 50
    assert dropped == 0 if when == "always" else dropped > 50


@pytest.mark.parametrize("way", ["loops", pytest.param("chains", marks=SLOW), "trees"])
def test_masks_that_come_and_go_change_no_token(way, engines, model):
    made = [
        make_request(f"{gap}", [gap, 2, 3], max_tokens=90, constraint=Turns(VOCAB, [EOS], gap=gap), temperature=0.8)
        for gap in range(6, 18)
    ]
    core = engines(way)
    num_failures = core.get_metrics().num_step_failures_total
    for request in made:
        core.add_request(request)
    seen: dict[str, list[bool]] = {request.request_id: [] for request in made}
    while core.has_unfinished_requests():
        core.step()
        for request in made:
            seen[request.request_id].append(request.has_masks)
    assert core.get_metrics().num_step_failures_total == num_failures
    assert [(one.output_token_ids, one.status.value) for one in made] == [
        constrained_output(model, one) for one in made
    ]
    # Masks began again after they had ended.
    assert sum(any(had > has for had, has in pairwise(which)) for which in seen.values()) > 3


def test_forced_runs_save_steps(engines):
    forced, free = (RandomAutomaton(VOCAB, [EOS], share=0.6, forces=share, ends=0, seed=4) for share in (0.97, 0.0))
    steps = []
    for constraint in (forced, free):
        core = engines("loops")
        before = core.get_metrics().num_steps_total
        run_requests(core, [make_request("a", [1, 2, 3], max_tokens=90, constraint=constraint, temperature=0.5)])
        steps.append(core.get_metrics().num_steps_total - before)
    assert steps[0] < steps[1] / 2


def looked_at(name: str, **kind: Any) -> Request:
    runs = RandomAutomaton(VOCAB, [EOS], share=0.6, forces=0.95, ends=0, seed=4)
    prompt = [ord(name), 2, 3]
    return make_request(name, prompt, constraint=runs, temperature=0.5, logprobs=0, **{"max_tokens": 90, **kind})


def test_forced_runs_with_log_probabilities_are_computed_as_chunks(model, engines):
    core = engines("loops")
    before = core.get_metrics()
    one, other = looked_at("a"), make_request("b", [4, 5], max_tokens=120)
    run_requests(core, [one, other])
    check_logprobs(model, [one])
    between = core.get_metrics()
    assert between.constraint_forced_tokens_total - before.constraint_forced_tokens_total > 60
    assert (one.output_token_ids, one.status.value) == constrained_output(model, one)
    run_requests(core, [looked_at("a")])
    assert core.get_metrics().num_steps_total - between.num_steps_total < 60


def test_tokens_are_handed_out_with_their_log_probabilities(model, engines):
    core, request = engines("loops"), looked_at("a", stream=True)
    core.add_request(request)
    most, count = 0, 0
    while core.has_unfinished_requests():
        for landing in core.step():
            assert landing.last <= request.num_prompt_tokens + len(request.logprobs)
            assert landing.first == request.num_prompt_tokens + count
            most, count = max(most, landing.last - landing.first), count + landing.last - landing.first
        if request.awaits_logprobs:
            assert request.num_landed_tokens == request.landed.num_logprobs < request.num_output_tokens
    assert count == 90 and most > 8
    check_logprobs(model, [request])


@pytest.mark.parametrize(
    "when", ["preempted", *(pytest.param(when, marks=SLOW) for when in ("aborted", "interrupted"))]
)
def test_awaited_tokens_are_forgotten_and_forced_again(model, when, monkeypatch):
    of_awaited: list[str] = []

    def preempt(scheduler: Scheduler, victim: Request, plan: LaunchPlan) -> None:
        of_awaited.extend([victim.request_id] * victim.awaits_logprobs)
        preempts(scheduler, victim, plan)

    preempts = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    room = {"max_model_len": 112, "kv_cache_tokens": 112} if when == "preempted" else {}
    # With few tokens a launch, runs take several.
    core = make_engine(model, max_num_batched_tokens=64 if when == "preempted" else 4, **room)
    requests = [looked_at(name, seed=seed) for seed, name in enumerate("abc")]
    for request in requests:
        core.add_request(request)
    times = 0
    while core.has_unfinished_requests():
        core.step()
        awaiting = [one for one in requests if one.awaits_logprobs and not one.is_finished]
        if when == "aborted" and awaiting:
            core.abort(awaiting[0].request_id)
            assert awaiting[0].num_output_tokens == len(awaiting[0].logprobs)
        if when == "interrupted" and awaiting and times < 5:
            times += 1
            fails = mock.patch.object(core.launcher.scheduler, "update_from_output", side_effect=KeyboardInterrupt)
            with fails, contextlib.suppress(KeyboardInterrupt):
                core.step()
    assert when != "preempted" or of_awaited
    assert when != "interrupted" or times == 5
    check_logprobs(model, requests)
    if when != "aborted":
        assert [one.output_token_ids for one in requests] == [constrained_output(model, one)[0] for one in requests]


def test_preempted_requests_and_those_that_come_with_cached_prompts_get_their_tokens(model, expected):
    core = make_engine(model, kv_cache_tokens=80, max_model_len=60)
    for _ in range(2):
        assert outcomes(core, requests()) == expected
    metrics = core.get_metrics()
    assert metrics.num_preemptions_total > 3 and metrics.prefix_cache_hits > 40


@pytest.mark.parametrize("mode", ["in_one_sequence", "batching"])
@pytest.mark.parametrize("way", ["loops", pytest.param("trees", marks=SLOW)])
def test_branches_have_constraints_of_their_own(way, mode, engines, model):
    prefix, suffixes = random_prompts([13])[0], random_prompts([3, 5, 1, 4], seed=5)
    each = [{"constraint": HALF}, {"constraint": RUNS, "temperature": 0.7}, {}, {"constraint": TIGHT, "top_p": 0.9}]
    options: dict[str, Any] = {"each": each, "max_tokens": 14, "eos_token_ids": [EOS], "temperature": 0.3}
    wanted = [constrained_output(model, one)[0] for one in alone("g", prefix, suffixes, **options) if one.guard]
    got = run_groups(engines(way), [make_group("g", prefix, suffixes, branch_mode=mode, **options)])
    assert [got[index] for index in (0, 1, 3)] == wanted


def test_rows_whose_walks_are_late_land_later_and_get_their_tokens(engines, expected, monkeypatch):
    core = engines("loops")
    monkeypatch.setattr(core.launcher._walkers, "_workers", LateWorkers())
    most = 0
    for request in requests():
        core.add_request(request)
    held = [request for request in core.scheduler.requests.values() if request.guard]
    while core.has_unfinished_requests():
        core.step()
        most = max(most, core.launcher.num_walking)
    assert most > 1
    assert {one.request_id: (one.output_token_ids, one.status.value) for one in held} == expected


def test_a_walk_that_never_ends_ends_its_request_alone(engines, expected, monkeypatch):
    is_over, in_time = threading.Event(), []

    class Stuck(RandomAutomaton):
        def advance(self, state, token):
            if state != self.start:
                in_time.append(is_over.wait(timeout=60.0))
            return super().advance(state, token)

    core = engines("loops")
    monkeypatch.setattr(core.launcher._walkers, "_workers", Workers(patience=1.5))
    stuck = make_request("stuck", [1, 2, 3], constraint=Stuck(VOCAB, [EOS], share=0.9), max_tokens=20)
    others = [request for request in requests() if request.guard]
    run_requests(core, [*others, stuck])
    is_over.set()
    assert stuck.status.value == "error" and "took more than 1.5 seconds" in str(stuck.error)
    assert {one.request_id: (one.output_token_ids, one.status.value) for one in others} == expected
    assert all(in_time), "the engine has waited for the walk"


def test_where_nothing_may_follow_the_request_ends_with_the_reason(engines):
    first = RandomAutomaton(VOCAB, [EOS], share=0.3, seed=5)
    barred = [token for token in range(VOCAB) if first.mask(first.start)[token]]
    excluded = make_request("set", [4, 5], constraint=first, bad_token_ids=[(token,) for token in barred])
    forcing = RandomAutomaton(VOCAB, [EOS], share=0.6, forces=1.0, seed=6)
    only = forcing.forced(forcing.start)
    assert only is not None
    forced = make_request("run", [4, 5], constraint=forcing, bad_token_ids=[(only,)])
    beside = make_request("beside", [1, 2, 3], constraint=HALF, max_tokens=5)
    run_requests(engines("loops"), [excluded, forced, beside])
    assert [one.status.value for one in (excluded, forced)] == ["error", "error"]
    assert "no token may follow" in str(excluded.error) and f"allows token {only} alone" in str(forced.error)
    assert not excluded.output_token_ids and not forced.output_token_ids
    assert beside.num_output_tokens == 5


def test_an_output_that_is_complete_ends_with_stop_before_min_tokens(engines):
    ended = RandomAutomaton(VOCAB, [EOS], share=0.9, ends=0.3, seed=11)
    request = make_request(
        "a", [1, 2, 3], constraint=ended, eos_token_ids=[EOS], min_tokens=60, max_tokens=80, temperature=1.0, seed=3
    )
    run_requests(engines("loops"), [request])
    assert request.status.value == "stop" and request.num_output_tokens < 60 and request.token_ids[-1] == EOS


@pytest.mark.parametrize("way", ["loops", pytest.param("chains", marks=SLOW)])
def test_after_failures_and_interruptions_the_tokens_are_the_same(way, engines, expected):
    core = engines(way)
    made = requests()
    for request in made:
        core.add_request(request)
    num_steps = 0
    while core.has_unfinished_requests():
        num_steps += 1
        if num_steps % 4 == 0:
            fails = mock.patch.object(core.launcher.scheduler, "update_from_output", side_effect=KeyboardInterrupt)
            with fails, contextlib.suppress(KeyboardInterrupt):
                core.step()
        else:
            core.step()
    assert {one.request_id: (one.output_token_ids, one.status.value) for one in made if one.guard} == expected


@property
def stays(bounded):
    return of_seats(bounded.bounds.masked_at, bounded.seat) > 0


def masked_first(bounded, tokens):
    return bounded.are_masked


def of_the_next_seat(self, packed, place, used, entering):
    fill(self, packed, place, used, entering)
    packed["mask"][:] = np.roll(packed["mask"], 1, axis=0)


def with_mask_of_the_parent(guard, state, tokens, limits):
    found, path = walk(guard, state, tokens, limits), [state]
    for token in [*tokens[: found.num_kept], *found.forced]:
        path.append(guard.advance(path[-1], token))
    return found if found.mask is None else replace(found, mask=guard.mask(path[max(0, len(path) - 2)], VOCAB))


def ending_early(guard, state, tokens, limits):
    """The text could end, and more could follow. (A second EOS has no effect: what lands is cut at the first.)"""
    found = walk(guard, state, tokens, limits)
    may_end = guard.grammar is not None and guard.grammar.is_final(found.state.of_grammar)
    return replace(found, is_complete=True) if may_end else found


fill = SeatEntries._fill
BUGS = {
    "the mask of the state before": (walkers, "walk", with_mask_of_the_parent),
    "an end that comes too early": (walkers, "walk", ending_early),
    "a mask that stays": (Bounded, "are_masked", stays),
    "a draw from the mask alone": (Bounded, "refused", masked_first),
    "the mask of another seat": (SeatEntries, "_fill", of_the_next_seat),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, model, engines, expected, masks, monkeypatch):
    masks("always" if bug == "a draw from the mask alone" else "never")
    monkeypatch.setattr(*BUGS[bug])
    core = make_engine(model) if BUGS[bug][0] is Bounded else engines("loops")  # what is traced is traced anew
    assert outcomes(core, requests()) != expected
