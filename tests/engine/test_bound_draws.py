"""Draws under the bounds of seats (penalties, biases ...) are equal in every way of decoding; planted bugs show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine import seat_entries
from jaxinfer.engine.core import EngineCore
from jaxinfer.programs import seats
from jaxinfer.programs.entry import COUNTS_OF_ENTRY, Enters, EntryShape
from jaxinfer.programs.program import BOUNDS as BOUNDS_BY_SEAT
from jaxinfer.sampling.bounds import Bounded, counted
from jaxinfer.scheduling.request import Request
from jaxinfer.speculative import draft_model, eagle3, rounds
from jaxinfer.speculative.gamma import FixedGamma
from jaxinfer.speculative.ngram import NgramProposer
from tests.branching.builders import alone, make_group, run_groups
from tests.builders import (
    drain,
    make_engine,
    make_request,
    model_config,
    one_by_one,
    random_model,
    random_prompts,
    run_requests,
)
from tests.speculative.builders import (
    NUM_DRAFTS,
    TREES,
    WAYS,
    engine_of,
    random_head,
    speculating_engine,
)

SHARED = random_prompts([17], seed=8)[0]
BOUNDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8, "seed": 3, "temperature": 0.9},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {7: 6.0, 42: 4.0, 13: -3.0}, "seed": 4, "temperature": 0.8},
    "allowed": {"allowed_token_ids": list(range(5, 60)), "frequency_penalty": 0.5},
    "bad": {"bad_token_ids": [(7,), (9, 11), (50, 51, 52)], "presence_penalty": -2.0},
    "least": {"min_tokens": 9, "eos_token_ids": list(range(0, 101, 3)), "temperature": 1.2, "seed": 5},
    "looked at": {"logprobs": 2, "repetition_penalty": 1.3},
    "all": {
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {5: 3.0},
        "allowed_token_ids": list(range(80)), "bad_token_ids": [(6,)], "min_tokens": 4, "eos_token_ids": [8, 9],
    },
}  # fmt: skip


def requests(max_tokens: int = 18, prefix: int = 17) -> list[Request]:
    """One of each kind, with a beginning that they share."""
    return [
        make_request(name, [*SHARED[:prefix], *SHARED[: number % 3]], max_tokens=max_tokens, **params)
        for number, (name, params) in enumerate(BOUNDS.items())
    ]


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module")
def single(model) -> EngineCore:
    """A step for each token, one request at a time: what `test_core_adjusting` compares with the oracle."""
    return make_engine(model, max_num_seqs=1, max_decode_steps=1, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def expected(single) -> dict[str, list[int]]:
    return dict(zip(BOUNDS, one_by_one(single, requests()), strict=True))


@pytest.fixture(scope="module")
def engines(model) -> Callable[[str], EngineCore]:
    made: dict[str, EngineCore] = {}

    def get(way: str) -> EngineCore:
        if way not in made:
            made[way] = engine_of(way, model, **({} if way == "loops" else {"kv_cache_tokens": 256}))
        assert made[way].reset_prefix_cache()
        return made[way]

    return get


def tokens_of(core: EngineCore, made: list[Request]) -> dict[str, list[int]]:
    return dict(zip((request.request_id for request in made), run_requests(core, made), strict=True))


def test_bounds_change_what_is_drawn(expected):
    assert len({tuple(tokens) for tokens in expected.values()}) == len(BOUNDS)


@pytest.mark.parametrize("way", WAYS)
def test_bound_requests_beside_each_other_get_their_tokens_in_every_way(way, engines, expected):
    """Once with prompts that are computed, once with prompts that are cached whole; seats change hands meanwhile."""
    core = engines(way)
    assert tokens_of(core, requests()) == expected
    before = core.get_metrics().prefix_cache_hits
    again = requests()
    assert tokens_of(core, again[::-1]) == expected
    assert core.get_metrics().prefix_cache_hits > before
    assert all(len(request.logprobs) == len(request.output_token_ids) for request in again if request.logprobs)


@pytest.mark.parametrize("way", ["loops", "draft model"])
def test_a_prompt_that_is_cached_whole_is_no_chunk(way, engines, expected, monkeypatch):
    core = engines(way)
    run_requests(core, requests()[:1])
    launches = []
    launch = core.runner.launch
    monkeypatch.setattr(
        core.runner, "launch", lambda program, shape, *more: launches.append(program) or launch(program, shape, *more)
    )
    made = [make_request("plain", SHARED, max_tokens=18), make_request("bias", SHARED, max_tokens=18, **BOUNDS["bias"])]
    run_requests(core, made)
    assert made[0].num_cached_tokens == made[1].num_cached_tokens == 16
    assert made[0].output_token_ids == expected["plain"]
    assert launches[0] is core.programs.entry
    if way == "loops":
        assert core.programs.step not in launches


@pytest.mark.parametrize("way", ["loops", "chains"])
def test_preempted_requests_count_each_of_their_tokens_once(way, engines, single):
    core = engines(way)

    def made() -> list[Request]:
        kinds = [BOUNDS[name] for name in ("presence", "frequency", "all", "looked at")]
        prompts = random_prompts((62, 58, 60, 62), seed=5)
        return [make_request(str(i), p, max_tokens=20, **kinds[i]) for i, p in enumerate(prompts)]

    before = core.get_metrics().num_preemptions_total
    assert run_requests(core, made()) == one_by_one(single, made())
    assert core.get_metrics().num_preemptions_total > before


@pytest.mark.parametrize("way", ["loops", "trees"])
def test_after_a_recovery_bounds_are_as_they_were(way, engines, expected, monkeypatch):
    core, made = engines(way), requests()
    for request in made:
        core.add_request(request)
    for _ in range(4):
        core.step()
    lose_the_device(core, monkeypatch)
    drain(core)
    assert {request.request_id: request.output_token_ids for request in made} == expected


def lose_the_device(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next launch fail."""

    def broken(*launch: Any) -> None:
        raise RuntimeError("the device is lost")

    before = core.metrics.num_recoveries_total
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "launch", broken)
        while core.metrics.num_recoveries_total == before:
            assert core.has_unfinished_requests(), "there is nothing to launch any more"
            core.step()


@pytest.mark.parametrize("way", ["loops", "ngram", "draft model"])
@pytest.mark.parametrize("mode", ["in_one_sequence", "batching"])
def test_branches_are_bound_each_for_itself(mode, way, engines, single):
    core = engines(way)
    names = ("repetition", "plain", "presence")
    each = [{**BOUNDS[name], "max_tokens": 14, "temperature": 0.9} for name in names]
    suffixes = [[3], [4, 5], [6]]
    group = make_group("g", SHARED, suffixes, branch_mode=mode, each=each)
    beside = make_request("beside", SHARED, max_tokens=14, **BOUNDS["bias"])
    got = run_groups(core, [group], [beside])
    others = [*alone("g", SHARED, suffixes, each=each), make_request("b", SHARED, max_tokens=14, **BOUNDS["bias"])]
    assert got == one_by_one(single, others)


def test_counts_that_need_several_entries_are_all_there(model, single, monkeypatch):
    shapes = EntryShape.all_of(2, model.config.vocab_size)
    small = {**shapes, Enters.ALL: shapes[Enters.ALL]._replace(num_seats=2, num_counts=3)}
    monkeypatch.setattr(EntryShape, "all_of", lambda *sizes: small)
    assert COUNTS_OF_ENTRY > 3
    core = make_engine(model, max_num_seqs=2)
    request = make_request("a", SHARED, max_tokens=60, **BOUNDS["frequency"])
    core.add_request(request)
    while request.num_output_tokens < 20:
        core.step()
    lose_the_device(core, monkeypatch)
    drain(core)
    assert [request.output_token_ids] == one_by_one(
        single, [make_request("a", SHARED, max_tokens=60, **BOUNDS["frequency"])]
    )


def test_the_last_token_of_a_prompt_counted_as_output_is_found(model, monkeypatch, single):
    def made() -> list[Request]:
        prompts = [[*SHARED[:5], token] for token in range(0, 101, 9)]
        return [make_request(str(i), p, max_tokens=6, presence_penalty=-2.0) for i, p in enumerate(prompts)]

    right = one_by_one(single, made())
    assert run_requests(make_engine(model), made()) == right
    monkeypatch.setattr(seats, "latest_output", lambda bounds, seat, token, position: token)
    assert run_requests(make_engine(model), made()) != right


@pytest.mark.parametrize("is_planted", [False, True], ids=["as it is", "the latest counted too"])
def test_a_seat_that_is_entered_anew_counts_all_outputs_but_the_latest(is_planted, model, monkeypatch):
    if is_planted:
        monkeypatch.setattr(seat_entries, "islice", lambda tokens, first, last: islice(tokens, first, last + 1))
    core = make_engine(model, max_num_seqs=1, overlap=False)
    request = make_request("a", SHARED, max_tokens=40, stream=True, **BOUNDS["frequency"])
    core.add_request(request)
    while request.num_output_tokens < 9:
        core.step()
    lose_the_device(core, monkeypatch)
    while request.num_output_tokens < 12:
        core.step()
    counts = np.asarray(core.runner.state[BOUNDS_BY_SEAT].counts[request.seat])
    found = {token: int(counts[token]) for token in np.flatnonzero(counts).tolist()}
    assert (found == Counter(request.output_token_ids[:-1])) != is_planted


def test_a_rejected_draft_that_is_counted_is_found(model, monkeypatch, single):
    drafted: list[Any] = []
    propose = NgramProposer.propose

    def noted(self, device, seated, shape):
        changed, drafts = propose(self, device, seated, shape)
        drafted[:] = [drafts]
        return changed, drafts

    def with_rejected(bounds, seated, landed):
        tokens = jnp.concatenate([seated.token[:, None], drafted[0].tokens], axis=1)
        there = seated.runs[:, None] & (jnp.arange(tokens.shape[1]) <= drafted[0].count[:, None])
        position = seated.length[:, None] - 1 + jnp.arange(tokens.shape[1])
        return counted(bounds, seated.batch.row_seat, position, jnp.where(there, tokens, -1))

    monkeypatch.setattr(NgramProposer, "propose", noted)
    monkeypatch.setattr(rounds, "_counted", with_rejected)

    def made() -> list[Request]:
        return [make_request(str(i), 4 * SHARED[:6], max_tokens=24, frequency_penalty=0.2 + 0.2 * i) for i in range(4)]

    core = speculating_engine(model, None, FixedGamma(NUM_DRAFTS))
    assert run_requests(core, made()) != one_by_one(single, made())
    assert core.metrics.spec_decode_num_draft_tokens > core.metrics.spec_decode_num_accepted_tokens


def test_a_stale_token_before_the_latest_shows_as_rejections(model, monkeypatch):
    """It writes wrong keys into a page that others read."""
    fill = seat_entries._fill_tokens

    def stale(packed, place, entering):
        fill(packed, place, entering)
        packed["before"][place] = 1

    def rejected(core: EngineCore) -> int:
        run_requests(core, [make_request("a", SHARED, max_tokens=4)])
        again = [make_request(str(i), SHARED, max_tokens=24, temperature=0.8, seed=i) for i in range(3)]
        run_requests(core, again)
        assert all(request.num_cached_tokens == 16 for request in again)
        return sum(r.metrics.num_draft_tokens - r.metrics.num_accepted_tokens for r in again)

    assert rejected(speculating_engine(model, model)) == 0
    monkeypatch.setattr(seat_entries, "_fill_tokens", stale)
    assert rejected(speculating_engine(model, model)) > 0


@pytest.mark.parametrize("drafter", ["draft model", "trees"])
def test_drafts_are_drawn_within_bounds(drafter, model, monkeypatch):
    """Where few tokens are allowed, a drafter that knows which ones agrees with the target more often."""
    module = draft_model if drafter == "draft model" else eagle3

    def accepted() -> float:
        is_tree = drafter == "trees"
        core = speculating_engine(
            model, random_head(model.config) if is_tree else model,
            FixedGamma(NUM_DRAFTS, TREES["num_speculative_tokens"] if is_tree else 0),
            speculative=TREES if is_tree else None, kv_cache_tokens=256,
        )  # fmt: skip
        made = [
            make_request(
                str(i), SHARED, max_tokens=30, temperature=0.7, seed=i, allowed_token_ids=list(range(i, 101, 12))
            )
            for i in range(4)
        ]
        run_requests(core, made)
        return core.metrics.spec_decode_num_accepted_tokens / core.metrics.spec_decode_num_draft_tokens

    within = accepted()
    monkeypatch.setattr(module, "Bounded", lambda bounds, seat, *more: Bounded(bounds, jnp.full_like(seat, -1), *more))
    assert within > 1.5 * accepted()
