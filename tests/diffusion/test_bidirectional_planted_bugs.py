"""Planted bugs of bidirectional diffusion: a wrong loop, and an engine with a bug, do other rounds."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.diffusion import canvas_rounds, vicinity
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.scheduling.request import Request
from jaxinfer.strategies.bidirectional import BidirectionalDiffusion
from tests.builders import drain, random_model, run_requests
from tests.diffusion import vicinity_numpy as loop
from tests.diffusion.bidirectional_builders import (
    CACHES,
    SMOOTH,
    bidirectional_config,
    decoded,
    diffusion_config,
    engine_of,
    requests,
    rounds_in,
    rounds_of,
)
from tests.diffusion.builders import MASK, sure_of_masks


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(bidirectional_config(), seed=5)


@pytest.fixture(scope="module")
def sure() -> DecoderLM:
    return sure_of_masks(random_model(bidirectional_config(), seed=5))


@pytest.fixture(scope="module")
def rounds_of_engine(model, sure) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Rounds of two requests to the model, and of one to the model that is sure of masks."""
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    core = engine_of(model, config)
    found = [rounds_of(core, request) for request in requests()[:2]]
    found.append(rounds_of(engine_of(sure, config), requests()[0]))
    assert found == [rounds_in(decoded(each, request, config), request) for each, request in looked_at(model, sure)]
    return found


def looked_at(model: DecoderLM, sure: DecoderLM) -> list[tuple[DecoderLM, Request]]:
    first, second = requests()[:2]
    return [(model, first), (model, second), (sure, first)]


@pytest.mark.parametrize("bug", loop.BUGS)
def test_what_the_engine_does_is_not_what_a_wrong_loop_does(bug, model, sure, rounds_of_engine):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    wrong = [rounds_in(decoded(each, request, config, bug), request) for each, request in looked_at(model, sure)]
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
PLANTED = [no_refresh, counter_by_block, *IN_PROGRAMS]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(bug, model, monkeypatch):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    bug(monkeypatch)
    core = engine_of(model, config)
    assert any(
        rounds_of(core, request) != rounds_in(decoded(model, request, config), request) for request in requests()[:3]
    )


def test_masks_are_never_drawn(sure, monkeypatch):
    config = diffusion_config(**CACHES["vicinity"], **SMOOTH)
    (request, same, *_) = requests()[0], requests()[0]
    found = decoded(sure, request, config).tokens
    assert run_requests(engine_of(sure, config), [request])[0] == found and MASK not in found
    masks_are_drawn(monkeypatch)
    core = engine_of(sure, config)
    core.add_request(same)
    with contextlib.suppress(AssertionError):  # a round may commit nothing but masks for ever
        drain(core, max_steps=100)
    assert same.output_token_ids != found
