"""Where tokens come from: accepted drafts, second draws and forced tokens are marked, each where it is."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest

from jaxinfer.constraints.guard import GuardState
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.scheduling.request import Request
from jaxinfer.speculative.gamma import Choice, FixedGamma
from tests.builders import make_request, model_config, random_model, random_prompts, run_requests
from tests.constraints.oracle import constrained_output
from tests.constraints.toys import RandomAutomaton, automata
from tests.engine.test_constraints import LateWorkers
from tests.speculative.builders import speculating_engine, speculation_of

VOCAB, EOS = 101, 100
LOOSE, HALF, TIGHT, RUNS = automata(VOCAB, EOS)
ANY = RandomAutomaton(VOCAB, [EOS], share=1.0, ends=0)
RUNS_ONLY = RandomAutomaton(VOCAB, [EOS], share=0.6, forces=0.95, ends=0, seed=4)

# The first token, and five rounds whose three drafts are accepted.
ROUNDS = ["drawn", *["draft", "draft", "draft", "drawn"] * 5]


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(model_config())


@pytest.fixture(scope="module")
def core(model) -> EngineCore:
    """An engine whose drafter is the model itself: all drafts are accepted, unless a grammar refuses them."""
    return speculating_engine(model, model, max_num_seqs=2, max_num_batched_tokens=24, kv_cache_tokens=256)


class OneMoreForEachSeat(FixedGamma):
    """Chooses one draft for the first seat, two for the second, and so on."""

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        return Choice(np.minimum(1 + seats, self.num_drafts))


def asks(name: str, prompt: list[int], **kind) -> Request:
    return make_request(name, prompt, return_token_sources=True, **{"max_tokens": 22, **kind})


def sources(request: Request) -> list[str]:
    return request.marks.sources(0, request.num_output_tokens)


def test_the_last_token_of_each_round_was_drawn_and_those_before_it_were_drafts(core):
    requests = [
        asks(str(seed), prompt, temperature=1.0, seed=seed) for seed, prompt in enumerate(random_prompts((5, 9)))
    ]
    run_requests(core, requests)
    # The last round has room for one token.
    assert [sources(request) for request in requests] == [[*ROUNDS, "drawn"]] * 2


def test_a_draft_that_ends_its_sequence_is_a_draft(core):
    tokens = asks("a", [4, 5, 6])
    run_requests(core, [tokens])
    ending = tokens.output_token_ids[6]
    first = tokens.output_token_ids.index(ending)
    request = asks("b", [4, 5, 6], eos_token_ids=[ending])
    run_requests(core, [request])
    assert sources(request) == ROUNDS[: first + 1]
    assert sources(request)[-1] == "draft"


def test_rounds_of_any_number_of_drafts_are_marked(core, monkeypatch):
    monkeypatch.setattr(speculation_of(core), "controller", OneMoreForEachSeat(3))
    requests = [asks("a", [5, 6, 7]), asks("b", [8, 9])]
    run_requests(core, requests)
    found = sorted(sources(one)[:7] for one in requests)
    assert found == [["drawn", *["draft", "draft", "drawn"] * 2], ["drawn", *["draft", "drawn"] * 3]]
    assert all(sources(one).count("draft") == one.metrics.num_accepted_tokens for one in requests)


def test_nothing_is_marked_for_requests_that_do_not_ask(core):
    asking, other = asks("a", [1, 2, 3]), make_request("b", [1, 2, 3], max_tokens=22)
    run_requests(core, [asking, other])
    assert other.marks.accepted_at == [] and len(asking.marks.accepted_at) == 15
    assert asking.output_token_ids == other.output_token_ids


def constrained() -> list[Request]:
    kinds = [
        {"constraint": LOOSE}, {"constraint": HALF, "temperature": 0.9, "seed": 3},
        {"constraint": TIGHT, "temperature": 1.2, "seed": 4}, {"constraint": RUNS, "temperature": 0.8, "seed": 5},
        {"constraint": RUNS_ONLY, "temperature": 0.5, "max_tokens": 40}, {"constraint": HALF, "top_k": 3, "seed": 6},
        {"constraint": RUNS_ONLY, "temperature": 0.7, "logprobs": 0, "seed": 7}, {"temperature": 0.7, "seed": 1},
    ]  # fmt: skip
    prompts = random_prompts((12, 9, 5, 17, 3, 8, 6, 11))
    return [
        asks(str(number), prompt, eos_token_ids=[EOS], **kind)
        for number, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


@pytest.fixture(scope="module")
def redrawn(model) -> dict[str, list[int]]:
    """Numbers of tokens that a plain loop with masks draws again, by request."""
    found: dict[str, list[int]] = {}
    for request in constrained():
        if request.guard is not None:
            constrained_output(model, request, found.setdefault(request.request_id, []))
    return found


def check(requests: list[Request], redrawn: dict[str, list[int]]) -> list[str]:
    """Tokens that the grammar allows alone may be forced or drawn; every other one is what the plain loop says."""
    seen = []
    for request in requests:
        found, guard, marks = sources(request), request.guard, request.marks
        seen += found
        for numbers in (marks.accepted_at, marks.redrawn_at, marks.forced_at):
            assert numbers == sorted(set(numbers))
        if guard is None:
            assert set(found) <= {"drawn", "draft"}
            continue
        state: GuardState | None = guard.start
        for number, (token, source) in enumerate(zip(request.output_token_ids, found, strict=True)):
            assert state is not None
            if guard.forced(state) is None and not guard.ends(state):
                assert (source == "redrawn") == (number in redrawn[request.request_id]) and source != "forced"
            else:
                assert source != "forced" or token in (guard.forced(state), guard.ends(state))
            state = guard.advance(state, token)
    return seen


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_second_draws_and_forced_tokens_are_those_of_the_plain_loop(core, redrawn, late, monkeypatch):
    if late:
        monkeypatch.setattr(core.launcher._walkers, "_workers", LateWorkers())
    free, requests = asks("free", [6, 7, 8], constraint=ANY), constrained()
    run_requests(core, [free, *requests])
    assert sources(free) == [*ROUNDS, "drawn"]
    seen = check(requests, redrawn)
    assert min(seen.count(source) for source in ("drawn", "draft", "redrawn", "forced")) > 2


def test_after_interruptions_tokens_have_the_marks_of_what_has_landed(core, redrawn):
    requests = constrained()
    for request in requests:
        core.add_request(request)
    # After marks, before the landing is committed.
    extend, calls, times = Request.extend, itertools.count(1), 0

    def extend_or_stop(self, *arguments, **named):
        if next(calls) % 9 == 0:
            raise KeyboardInterrupt
        return extend(self, *arguments, **named)

    with mock.patch.object(Request, "extend", extend_or_stop):
        while core.has_unfinished_requests():
            try:
                core.step()
            except KeyboardInterrupt:
                times += 1
    check(requests, redrawn)
    assert times > 3
