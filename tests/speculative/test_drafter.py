"""A drafter that is the target itself is never wrong: whatever it has missed or mixed up shows as a rejection."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.scheduling.request import Request
from jaxinfer.speculative import accept, draft_model, rounds
from jaxinfer.speculative.gamma import NO_SEAT, Choice, EntropyController, FixedGamma
from jaxinfer.strategies.drafter_lanes import DrafterLanes
from tests.builders import make_request, model_config, random_model, random_prompts, run_requests
from tests.speculative.builders import NUM_DRAFTS, AnyGamma, speculating_engine, speculation_of


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module")
def shared_engine(model) -> EngineCore:
    return speculating_engine(model, model)


@pytest.fixture
def core(shared_engine) -> EngineCore:
    """With nothing cached and nothing counted."""
    assert not shared_engine.has_unfinished_requests() and shared_engine.reset_prefix_cache()
    speculation_of(shared_engine).controller = FixedGamma(NUM_DRAFTS)
    return shared_engine


def rejected(core: EngineCore, requests: list[Request]) -> int:
    """Drafted tokens that were not accepted."""
    run_requests(core, requests)
    return sum(r.metrics.num_draft_tokens - r.metrics.num_accepted_tokens for r in requests)


def some_requests(max_tokens: int = 24, **params) -> list[Request]:
    prompts = random_prompts((60, 64, 9, 100, 70, 30, 2))
    return [
        make_request(str(i), p, max_tokens=max_tokens, seed=i, temperature=i % 3 / 2, **params)
        for i, p in enumerate(prompts)
    ]


def test_it_is_accepted_greedy_and_sampled_with_chunks_and_preemption(core):
    preemptions = core.get_metrics().num_preemptions_total
    requests = some_requests()
    assert rejected(core, requests) == 0
    assert sum(r.metrics.num_accepted_tokens for r in requests) > 50
    assert core.get_metrics().num_preemptions_total > preemptions


def test_it_is_accepted_whatever_was_drafted_in_the_rounds_before(core):
    """Times without drafts included: it catches up."""
    speculation_of(core).controller = AnyGamma(NUM_DRAFTS, seed=5)
    requests = some_requests(48)
    assert rejected(core, requests) == 0
    assert sum(r.metrics.num_accepted_tokens for r in requests) > 50
    assert 0 in speculation_of(core).controller.chosen  # type: ignore[attr-defined]


def test_it_is_accepted_behind_a_prefix_that_it_has_computed(core):
    prompt = random_prompts([90])[0]
    run_requests(core, [make_request("first", prompt, max_tokens=8)])
    filled = speculation_of(core).lanes.filled.copy()
    again = make_request("again", [*prompt, 3, 1, 4], max_tokens=20)
    assert rejected(core, [again]) == 0 and again.num_cached_tokens >= 84
    assert filled.sum() >= 20, "the bits of its pages were not kept"


def test_it_catches_up_behind_a_prefix_that_it_has_not_computed(core):
    prompt = random_prompts([90])[0]
    controller = Scripted()
    speculation_of(core).controller = controller
    controller.number = 0
    run_requests(core, [make_request("first", prompt, max_tokens=8)])
    controller.number = NUM_DRAFTS
    again = make_request("again", [*prompt, 3, 1, 4], max_tokens=20)
    assert rejected(core, [again]) == 0
    assert again.num_cached_tokens >= 84 and again.metrics.num_accepted_tokens >= 12


def test_acceptance_recovers_after_a_time_without_drafts(core):
    controller = Scripted()
    speculation_of(core).controller = controller
    request = make_request("a", random_prompts([20])[0], max_tokens=120)
    core.add_request(request)
    for number in (NUM_DRAFTS, 0, NUM_DRAFTS):
        controller.number = number
        for _ in range(2):
            core.step()
    before = request.metrics.num_accepted_tokens
    while core.has_unfinished_requests():
        core.step()
    assert request.metrics.num_accepted_tokens > before > 0
    assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens


def test_a_page_that_changes_hands_is_empty_for_the_drafter():
    lanes = DrafterLanes(num_pages=8, page_size=4, num_seats=2)
    request = make_request("a", range(20))
    request.seat, request.pages = 1, [5, 3, 6, 2, 7]
    lanes.computed(request, 18)
    assert np.flatnonzero(lanes.filled).tolist() == [2, 3, 5, 6]

    class Output:
        requests, new_pages, num_computed = [request], [[6]], [0]
        first_scheduled: set[str] = set()
        resumed: set[str] = set()

    lanes.take_pages(Output())  # type: ignore[arg-type]
    assert np.flatnonzero(lanes.filled).tolist() == [2, 3, 5]


class Scripted(FixedGamma):
    """Chooses what a test says."""

    def __init__(self) -> None:
        super().__init__(NUM_DRAFTS)
        self.number = NUM_DRAFTS

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        return Choice(np.full(len(seats), self.number))

    def would_draft(self, rows: int, pages_per_row: int) -> bool:
        return self.number > 0


# Each takes the place of a piece of the device's programs. Those that spoil drafts show as rejections, those that spoil
# what lands as other tokens.
def noise_of_the_next_position(wide_rows):
    def planted(batch, sampling):
        found = wide_rows(batch, sampling)
        return replace(found, sample_position=jnp.where(found.sample_position >= 0, found.sample_position + 1, -1))

    return planted


def shifted_by_one(wide_rows):
    def planted(batch, tokens, first, count, **sizes):
        return wide_rows(batch, tokens, first + (tokens.shape[1] > 2), count, **sizes)

    return planted


def only_the_latest_token(wide_rows):
    """What a drafter takes in that does not know that it lacks the last draft after all were accepted."""

    def planted(batch, tokens, first, count, **sizes):
        found = wide_rows(batch, tokens, first, count, **sizes)
        rows, width = tokens.shape
        if width > 2:
            return found
        before = jnp.arange(rows) * width
        return replace(found, slot_mapping=found.slot_mapping.at[before].set(10**6 + before))

    return planted


def landing_shifted_by_one(land):
    def planted(seats, seat, token, length, runs, sampled, accepted, **rules):
        return land(seats, seat, token, length, runs, jnp.roll(sampled, 1, axis=1), accepted, **rules)

    return planted


def one_more_than_was_drafted_well(num_accepted):
    def planted(drafts, count, sampled):
        return jnp.minimum(num_accepted(drafts, count, sampled) + 1, count)

    return planted


def token_before_the_latest_forgotten(land):
    """What a drafter may not have computed is not noted with the seat."""

    def planted(seats, *given, **rules):
        found, landed = land(seats, *given, **rules)
        return replace(found, before=seats.before), landed

    return planted


PLANTED = {
    "verification samples with the noise of the next position": (
        rounds, "sampled_everywhere", noise_of_the_next_position, "tokens",
    ),
    "verification reads and writes one place too far": (rounds, "wide_rows", shifted_by_one, "tokens"),
    "drafts land one place too late": (rounds, "land", landing_shifted_by_one, "tokens"),
    "a draft too many is accepted": (rounds, "num_accepted", one_more_than_was_drafted_well, "tokens of bad drafts"),
    "stale KV after full acceptance": (draft_model, "wide_rows", only_the_latest_token, "rejections"),
    "the drafter is not told the token before the latest": (
        rounds, "land", token_before_the_latest_forgotten, "rejections",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_out(bug, model, monkeypatch, idle_engine):
    where, name, plant, shows_as = PLANTED[bug]
    monkeypatch.setattr(where, name, plant(getattr(where, name)))
    drafter = model if shows_as != "tokens of bad drafts" else random_model(model_config(), seed=8)
    core = speculating_engine(model, drafter, max_num_seqs=1, max_num_batched_tokens=16)

    def requests() -> list[Request]:
        """One after the other."""
        prompts = random_prompts((12, 14))
        return [make_request(str(i), p, max_tokens=20, seed=i, temperature=i * 0.8) for i, p in enumerate(prompts)]

    ours = requests()
    if shows_as == "rejections":
        assert rejected(core, ours) > 0
        assert [r.output_token_ids for r in ours] == run_requests(idle_engine(), requests()), "drafts change no token"
    else:
        assert run_requests(core, ours) != run_requests(idle_engine(), requests())


def test_planted_pieces_are_those_that_programs_use():
    assert rounds.land is accept.land and rounds.num_accepted is accept.num_accepted


def test_a_sequence_without_a_seat_neither_reads_nor_writes_the_numbers_of_the_last_seat(core):
    strategy, last = speculation_of(core), core.config.max_num_seqs - 1
    controller = strategy.controller = EntropyController(last + 1, 101, gamma_min=1, gamma_max=NUM_DRAFTS)
    controller._lengths[last] = 1
    fork = make_request("fork", [1, 2, 3])
    assert fork.seat == NO_SEAT
    assert strategy.choose([fork], 0).most_tokens == NUM_DRAFTS + 1
    assert controller._lengths[last] == 1
