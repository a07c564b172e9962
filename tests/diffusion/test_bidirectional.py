"""Bidirectional diffusion in the engine matches the NumPy loop round by round, whatever else runs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.strategies import bidirectional
from jaxinfer.strategies.bidirectional import BidirectionalDenoiser
from tests.builders import drain, make_request, one_by_one, random_model, run_requests
from tests.diffusion.bidirectional_builders import (
    BLOCK,
    CACHES,
    SMOOTH,
    bidirectional_config,
    decoded,
    diffusion_config,
    engine_of,
    requests,
    rounds_in,
    rounds_of,
    strategy_of,
)
from tests.diffusion.builders import MASK


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(bidirectional_config(), seed=5)


@pytest.mark.parametrize(
    ("cache", "smooth"),
    [
        *(pytest.param(name, SMOOTH, id=f"{name}-smoothed") for name in ("none", "prefix", "vicinity")),
        *(pytest.param(name, {}, id=f"{name}-plain") for name in ("dual", "vicinity")),
        *(pytest.param(name, {}, id=f"{name}-plain", marks=pytest.mark.slow) for name in ("none", "prefix")),
        pytest.param("dual", SMOOTH, id="dual-smoothed", marks=pytest.mark.slow),
        *(
            pytest.param("wider than the sequence", smooth, id=f"wider-{number}", marks=pytest.mark.slow)
            for number, smooth in enumerate(({}, SMOOTH))
        ),
    ],
)
def test_every_round_commits_what_the_loop_commits(cache, smooth, model):
    config = diffusion_config(**CACHES[cache], **smooth)
    core = engine_of(model, config)
    for request in requests()[:3]:
        found = decoded(model, request, config)
        assert rounds_of(core, request) == rounds_in(found, request)
        assert request.output_token_ids == found.tokens
        assert MASK not in found.tokens


RULES = {
    "hierarchy": {"unmask": "hierarchy", "threshold": 0.3, "low_threshold": 0.1},
    "factor": {"unmask": "factor", "factor": 2.0},
    "credit": {"unmask": "credit"},
}


@pytest.mark.parametrize("smooth", [pytest.param({}, marks=pytest.mark.slow), SMOOTH], ids=["plain", "smoothed"])
@pytest.mark.parametrize("rule", RULES)
def test_rules(rule, smooth, model):
    config = diffusion_config(**{**CACHES["vicinity"], **RULES[rule], **smooth})
    core = engine_of(model, config)
    for request in requests()[:3]:
        found = decoded(model, request, config)
        assert rounds_of(core, request) == rounds_in(found, request)


@pytest.mark.parametrize("cache", ["none", "prefix", "vicinity"])
def test_tokens_do_not_depend_on_neighbours_and_order(cache, model):
    """Sixteen with mixed lengths, more than there are seats, in a pool that does not hold them all."""
    config = diffusion_config(**CACHES[cache], **SMOOTH)
    wanted = [decoded(model, request, config).tokens for request in requests()]
    core = engine_of(model, config)
    assert one_by_one(core, requests()) == wanted
    many = [*requests(), *requests(), *requests()][:16]
    for number, request in enumerate(many):
        request.request_id = str(number)
    order = np.random.default_rng(1).permutation(len(many)).tolist()
    assert run_requests(core, [many[i] for i in order]) == [wanted[i % len(wanted)] for i in order]
    assert core.get_metrics().num_preemptions_total == 0
    core.check_integrity()


def test_nothing_is_cached_for_others(model):
    core = engine_of(model, diffusion_config(**CACHES["vicinity"], **SMOOTH))
    run_requests(core, requests()[:2])
    again = requests()[:2]
    run_requests(core, again)
    assert core.get_metrics().prefix_cache_hits == 0
    assert core.scheduler.kv.num_available == core.scheduler.kv.allocator.num_pages


def test_a_sequence_ends_with_the_block_of_its_first_ending_token(model):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    for request in requests()[:3]:
        params = request.sampling_params
        token = decoded(model, request, config).tokens[8]
        ending = make_request(
            "a", request.prompt_token_ids, max_tokens=params.max_tokens or 0, seed=params.seed,
            temperature=params.temperature, eos_token_ids=[token],
        )  # fmt: skip
        found = decoded(model, ending, config)
        assert run_requests(engine_of(model, config), [ending])[0] == found.tokens
        assert found.tokens[-1] == token and len(found.tokens) <= 9
        assert ending.status is RequestStatus.FINISHED_STOPPED


def test_log_probabilities_are_those_of_the_round_that_committed(model):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    core = engine_of(model, config)
    for request, same in zip(requests(logprobs=2)[:3], requests()[:3], strict=True):
        found = decoded(model, same, config)
        assert run_requests(core, [request])[0] == found.tokens
        got = [entry[token].logprob for entry, token in zip(request.logprobs, found.tokens, strict=True)]
        np.testing.assert_allclose(got, found.logprobs, atol=1e-4)


def test_requests_that_do_not_fit_into_a_launch_are_refused(model):
    core = engine_of(model, diffusion_config())
    with pytest.raises(ValueError, match="may grow to 70 tokens.*at most 60 with max_num_batched_tokens=64"):
        core.add_request(make_request("a", [1] * 50, max_tokens=20))
    assert not core.has_unfinished_requests()
    core.add_request(make_request("b", [1] * 40, max_tokens=20))
    assert core.has_unfinished_requests()


def test_requests_can_be_aborted_and_others_go_on(model):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    core = engine_of(model, config)
    some = requests()[:4]
    for request in some:
        core.add_request(request)
    for _ in range(5):
        core.step()
    assert core.abort("1")
    drain(core)
    assert [some[i].output_token_ids for i in (0, 2, 3)] == [
        decoded(model, requests()[i], config).tokens for i in (0, 2, 3)
    ]
    assert not strategy_of(core).progress or set(strategy_of(core).progress) == {"3"}
    core.check_integrity()


def test_what_is_for_other_models_is_refused(model):
    with pytest.raises(ValueError, match="edit_threshold is for models"):
        bidirectional.vicinity_of(DiffusionConfig(edit_threshold=0.5), model.config)


def test_smoothed_embeddings_and_credits_are_counted(model):
    engine = EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64, page_size=8, kv_cache_tokens=64)
    plain, smoothed, credited = (
        BidirectionalDenoiser(diffusion_config(**more)).state_bytes(engine, model.config, jnp.dtype("float32"))
        for more in ({}, SMOOTH, {"unmask": "credit"})
    )
    assert smoothed - plain == 2 * 64 * model.config.hidden_size * 4
    assert credited - plain == 2 * BLOCK * model.config.vocab_size * 4
