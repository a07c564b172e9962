"""Bidirectional diffusion in the engine does, round by round, what the loop in NumPy does, whoever else runs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.diffusion import canvas_rounds, vicinity
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.engine import bidirectional
from jaxinfer.engine.bidirectional import BidirectionalDenoiser, BidirectionalDiffusion
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.strategy import LandedRounds
from jaxinfer.models.decoder import DecoderLM
from tests.builders import drain, make_request, model_config, random_model, random_prompts, run_requests
from tests.diffusion import vicinity_numpy as loop
from tests.diffusion.oracle import Rule, by_factor, by_hierarchy, by_threshold
from tests.sampling.reference import Filters

MASK, BLOCK, THRESHOLD = 100, 6, 0.25
CACHES = {
    "none": {"cache": "none"},
    "prefix": {"cache": "prefix", "prefix_look": 2},
    "dual": {"cache": "dual"},
    "vicinity": {"cache": "dual", "prefix_look": 5, "after_look": 3},
    "wider than the sequence": {"cache": "dual", "prefix_look": 40, "after_look": 40},
}
SMOOTH = {"cont_weight": 0.3, "warmup_steps": 3, "threshold_decay": 0.2}


def bidirectional_config(**overrides: Any):
    return model_config("LLaDAModelLM", **{"mask_token_id": MASK, **overrides})


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(bidirectional_config(), seed=5)


def diffusion_config(**more: Any) -> DiffusionConfig:
    return DiffusionConfig(**{"block_size": BLOCK, "threshold": THRESHOLD, "expected_tpf": 2, **more})


def engine_of(model: DecoderLM, config: DiffusionConfig, **limits: Any) -> EngineCore:
    engine = EngineConfig(
        **{
            "max_model_len": 80, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 8,
            "kv_cache_tokens": 160, **limits,
        }
    )  # fmt: skip
    dtype = jnp.dtype(jnp.float32)
    make_strategy = BidirectionalDenoiser(config).strategy(engine, model, dtype=dtype, mesh=None)
    return EngineCore(model, engine, dtype=dtype, make_strategy=make_strategy)


def strategy_of(core: EngineCore) -> BidirectionalDiffusion:
    assert isinstance(core.strategy, BidirectionalDiffusion)
    return core.strategy


def requests(**more: Any) -> list[Request]:
    """Of different lengths, greedy and sampled, the last block whole or not."""
    return [
        make_request(str(i), prompt, max_tokens=20 - 2 * i, seed=i, temperature=i % 3 / 2, **more)
        for i, prompt in enumerate(random_prompts((30, 7, 41, 1, 22, 15), vocab_size=MASK))
    ]


def decoded(model: DecoderLM, request: Request, config: DiffusionConfig, bug: str = "", **more: Any) -> loop.Decoded:
    """What the loop makes of a request."""
    params = request.sampling_params
    rules: dict[str, Any] = {
        "threshold": by_threshold,
        "credit": by_threshold,
        "hierarchy": lambda tau: by_hierarchy(tau, config.low_threshold),
        "factor": lambda tau: by_factor(config.factor),
    }

    def rule(tau: float) -> Rule:
        return rules[config.unmask](tau)

    smooth = loop.Smooth(
        config.warmup_steps, config.cont_weight, config.cont_weight_init, config.cont_weight_growth,
        config.threshold_decay,
    )  # fmt: skip
    credit = loop.Credit(config.credit_alpha, config.boost_gamma, config.decay_beta)
    return loop.generate(
        model, request.prompt_token_ids, params.max_tokens or 0, block_size=config.block_size or 0, rule=rule,
        threshold=config.threshold, cache="dual" if config.cache == "auto" else config.cache,
        prefix_look=config.prefix_look, after_look=config.after_look, smooth=smooth if config.smooths else None,
        eos=sorted(request.ending_token_ids),
        filters=Filters(params.temperature, params.top_k, params.top_p, params.min_p), request_key=request.request_key,
        credit=credit if config.unmask == "credit" else None, bug=bug, **more,
    )  # fmt: skip


def rounds_of(core: EngineCore, request: Request) -> list[tuple[int, tuple[int, ...]]]:
    """Where the block begins and what it is behind each round of a request that is alone."""
    found: list[tuple[int, tuple[int, ...]]] = []

    def listen(landed: LandedRounds[DenoiseOutput]) -> None:
        for row in landed.rows.tolist():
            for number in np.flatnonzero(np.asarray(landed.output.ran)[:, row]):
                start = int(landed.output.start[number, row])
                end = min(start + BLOCK, request.max_total_tokens)
                found.append((start, tuple(np.asarray(landed.output.blocks[number, row])[: end - start].tolist())))

    strategy_of(core).listeners.append(listen)
    core.add_request(request)
    drain(core)
    strategy_of(core).listeners.remove(listen)
    return found


def rounds_in(found: loop.Decoded, request: Request) -> list[tuple[int, tuple[int, ...]]]:
    return [(each.block, each.tokens[each.block : each.block + BLOCK]) for each in found.rounds]


@pytest.mark.parametrize(
    ("cache", "smooth"),
    [
        *(pytest.param(name, SMOOTH, id=f"{name}-smoothed") for name in ("none", "prefix", "vicinity")),
        *(pytest.param(name, {}, id=f"{name}-plain", marks=pytest.mark.unoptimized) for name in ("dual", "vicinity")),
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


@pytest.mark.unoptimized
@pytest.mark.parametrize("smooth", [pytest.param({}, marks=pytest.mark.slow), SMOOTH], ids=["plain", "smoothed"])
@pytest.mark.parametrize("rule", RULES)
def test_rules(rule, smooth, model):
    config = diffusion_config(**{**CACHES["vicinity"], **RULES[rule], **smooth})
    core = engine_of(model, config)
    for request in requests()[:3]:
        found = decoded(model, request, config)
        assert rounds_of(core, request) == rounds_in(found, request)


@pytest.fixture(scope="module")
def sure_of_masks() -> DecoderLM:
    """A model that thinks masks likelier than nearly everything."""
    model = random_model(bidirectional_config(), seed=5)
    assert model.lm_head is not None
    kernel = np.array(model.lm_head.kernel[...])
    kernel[MASK] = kernel[:MASK].max(axis=0)
    model.lm_head.kernel[...] = jnp.asarray(kernel)
    return model


@pytest.fixture(scope="module")
def rounds_of_engine(model, sure_of_masks) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Of two requests to the model, and of one to the model that is sure of masks."""
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    core = engine_of(model, config)
    found = [rounds_of(core, request) for request in requests()[:2]]
    found.append(rounds_of(engine_of(sure_of_masks, config), requests()[0]))
    assert found == [
        rounds_in(decoded(each, request, config), request) for each, request in looked_at(model, sure_of_masks)
    ]
    return found


def looked_at(model: DecoderLM, sure: DecoderLM) -> list[tuple[DecoderLM, Request]]:
    first, second = requests()[:2]
    return [(model, first), (model, second), (sure, first)]


@pytest.mark.parametrize("bug", loop.BUGS)
def test_what_the_engine_does_is_not_what_a_wrong_loop_does(bug, model, sure_of_masks, rounds_of_engine):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    wrong = [
        rounds_in(decoded(each, request, config, bug), request) for each, request in looked_at(model, sure_of_masks)
    ]
    assert wrong != rounds_of_engine


def no_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    take = BidirectionalDiffusion._take

    def bug(self, request, rounds, block, has_landed, *, is_chunk):
        take(self, request, rounds, block, has_landed, is_chunk=is_chunk)
        request.in_seat = request.in_seat or self.progress[request.request_id].start > request.num_prompt_tokens

    monkeypatch.setattr(BidirectionalDiffusion, "_take", bug)


def counter_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    take = BidirectionalDiffusion._take

    def bug(self, request, rounds, block, has_landed, *, is_chunk):
        take(self, request, rounds, block, has_landed, is_chunk=is_chunk)
        if has_landed:
            self.progress[request.request_id].round = 1

    monkeypatch.setattr(BidirectionalDiffusion, "_take", bug)


def convex_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = canvas_rounds.expected_embeddings

    def bug(model, hidden, mask):
        return mean(model, hidden, mask) - model.embed.embedding[mask]

    monkeypatch.setattr(canvas_rounds, "expected_embeddings", bug)


def constant_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vicinity.Smoothing, "weight", lambda self, number: jnp.full(number.shape, self.most))


def masks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = canvas_rounds.logits_without
    monkeypatch.setattr(canvas_rounds, "logits_without", lambda model, hidden, mask: logits(model, hidden, -1))


def windows_see_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    widen = canvas_rounds._with_windows

    def bug(batch, own, runs, where, how, **sizes):
        wide = widen(batch, own, runs, where, how, **sizes)
        rows, width = own.windows.shape
        end = jnp.repeat(where.start[:rows] + how.block_size - 1, width)
        limit = wide.limit[: rows * width]
        return replace(wide, limit=wide.limit.at[: rows * width].set(jnp.where(limit >= 0, end, -1)))

    monkeypatch.setattr(canvas_rounds, "_with_windows", bug)


IN_PROGRAMS = (convex_mix, constant_weight, windows_see_themselves_alone)
PLANTED = [no_refresh, counter_by_block, *(pytest.param(bug, marks=pytest.mark.unoptimized) for bug in IN_PROGRAMS)]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(bug, model, monkeypatch):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    bug(monkeypatch)
    core = engine_of(model, config)
    assert any(
        rounds_of(core, request) != rounds_in(decoded(model, request, config), request) for request in requests()[:3]
    )


def test_masks_are_never_drawn(sure_of_masks, monkeypatch):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    (request, same, *_) = requests()[0], requests()[0]
    found = decoded(sure_of_masks, request, config).tokens
    assert run_requests(engine_of(sure_of_masks, config), [request])[0] == found and MASK not in found
    masks_are_drawn(monkeypatch)
    core = engine_of(sure_of_masks, config)
    core.add_request(same)
    with contextlib.suppress(AssertionError):  # a round may commit nothing but masks for ever
        drain(core, max_steps=100)
    assert same.output_token_ids != found


@pytest.mark.parametrize("cache", ["none", "prefix", "vicinity"])
def test_tokens_do_not_depend_on_neighbours_and_order(cache, model):
    """Sixteen with mixed lengths, more than there are seats, in a pool that does not hold them all."""
    config = diffusion_config(**CACHES[cache], **SMOOTH)
    wanted = [decoded(model, request, config).tokens for request in requests()]
    core = engine_of(model, config)
    assert [run_requests(core, [request])[0] for request in requests()] == wanted
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
