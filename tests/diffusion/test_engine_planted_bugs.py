"""Bugs planted in block diffusion change tokens or caches, and are found; the mask token is never an output."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.diffusion import denoise
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.scheduling.request import Request
from jaxinfer.strategies import block_diffusion as denoising
from tests.builders import drain, make_request, one_by_one, random_model, random_prompts, run_requests
from tests.diffusion.builders import (
    MASK,
    diffusion_engine,
    diffusion_model_config,
    generated,
    replace_ending,
    requests,
    sure_of_masks,
)


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(diffusion_model_config())


@pytest.fixture(scope="module")
def wanted(model) -> list[list[int]]:
    return [generated(model, request).tokens for request in requests()]


def counter_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    after = denoise._after_round

    def bug(model, own, runs, hidden, batch, how):
        found = after(model, own, runs, hidden, batch, how)
        return found._replace(blocks=replace(found.blocks, round=own.round + runs))

    monkeypatch.setattr(denoise, "_after_round", bug)


def commit_round_is_left_out(monkeypatch: pytest.MonkeyPatch, of_last_blocks: bool = False) -> None:
    after = denoise._after_round

    def bug(model, own, runs, hidden, batch, how):
        found = after(model, own, runs, hidden, batch, how)
        full = runs & ~found.lands & ~jnp.any(found.tokens == how.mask_token_id, axis=1)
        if of_last_blocks:
            full &= denoise._end_of(found.tokens, own, batch, how)[1]
        # What has just become whole lands at once, with the keys and values of its masks.
        early = after(model, replace(own, tokens=found.tokens), full, hidden, batch, how)

        def pick(new, old):
            return jnp.where(full.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        of_blocks = {
            name: pick(getattr(early.blocks, name), getattr(found.blocks, name))
            for name in ("tokens", "start", "num_given", "round", "num_edits", "ended")
        }
        return found._replace(
            blocks=replace(found.blocks, **of_blocks),
            landed=pick(early.landed, found.landed),
            lands=found.lands | full,
        )

    monkeypatch.setattr(denoise, "_after_round", bug)


def blocks_land_up_to_their_first_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    end_of = denoise._end_of

    def bug(tokens, own, batch, how):
        last, ends = end_of(tokens, own, batch, how)
        is_mask = tokens == how.mask_token_id
        return jnp.where(ends & jnp.any(is_mask, axis=1), jnp.maximum(jnp.argmax(is_mask, axis=1) - 1, 0), last), ends

    monkeypatch.setattr(denoise, "_end_of", bug)


def prompts_are_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = denoising.BlockDiffusion.prepare

    def bug(self, output, built, batch, runner):
        before = built.packed["limit"].copy()
        prepare(self, output, built, batch, runner)
        built.packed["limit"][:] = before

    monkeypatch.setattr(denoising.BlockDiffusion, "prepare", bug)


@pytest.mark.parametrize(
    "bug",
    [
        counter_is_kept,
        commit_round_is_left_out,
        prompts_are_causal,  # in the programs of a right engine
    ],
    ids=lambda bug: bug.__name__,
)
def test_planted_bugs_are_found(bug, model, wanted, monkeypatch):
    bug(monkeypatch)
    assert one_by_one(diffusion_engine(model), requests()) != wanted


def test_a_page_is_cached_with_the_final_keys_and_values_of_its_last_block(model, monkeypatch):
    """Planted bug: the last block of a sequence is cached as it was when it had masks."""

    def next_turns() -> list[tuple[list[int], list[int]]]:
        """Tokens of the engine and of the loop. Prompts hold an answer that ended with a block and its page."""
        core, found = diffusion_engine(model), []
        for number, prompt in enumerate(random_prompts((9, 30), vocab_size=MASK)):
            answered = make_request("a", prompt, max_tokens=48 - len(prompt), seed=number)
            (tokens,) = run_requests(core, [answered])
            assert len(prompt) + len(tokens) == 48
            turn = make_request("b", [*prompt, *tokens, 5, 17], max_tokens=20, seed=number)
            (got,) = run_requests(core, [turn])
            assert turn.num_cached_tokens == 48
            found.append((got, generated(model, turn).tokens))
        return found

    assert all(got == wanted for got, wanted in next_turns())
    commit_round_is_left_out(monkeypatch, of_last_blocks=True)
    assert any(got != wanted for got, wanted in next_turns())


def test_an_end_counts_once_everything_before_it_is_known(model, wanted, monkeypatch):
    """Planted bug: masks before the end are not waited for."""

    def ending() -> list[Request]:
        pairs = zip(requests(), wanted, strict=True)
        return [replace_ending(request, token) for request, tokens in pairs for token in tokens[5:9]]

    several, again = ending(), ending()
    for number, (request, same) in enumerate(zip(several, again, strict=True)):
        request.request_id = same.request_id = str(number)
    assert run_requests(diffusion_engine(model), several) == [generated(model, request).tokens for request in ending()]
    blocks_land_up_to_their_first_mask(monkeypatch)
    wrong = diffusion_engine(model)
    for request in again:
        wrong.add_request(request)
    with pytest.raises(AssertionError, match="unfinished after"):  # the device is done, and the host misses the end
        drain(wrong, max_steps=len(again) * 24)


@pytest.fixture
def sure() -> DecoderLM:
    return sure_of_masks(random_model(diffusion_model_config()))


def test_the_mask_is_never_drawn(sure):
    got = run_requests(diffusion_engine(sure), requests()[:3])
    assert got == [generated(sure, request).tokens for request in requests()[:3]]
    assert not any(MASK in tokens for tokens in got)


def test_drawing_masks_would_go_on_forever(sure, monkeypatch):
    """Planted bug: a round commits masks."""
    logits = denoise.logits_without
    monkeypatch.setattr(denoise, "logits_without", lambda model, hidden, mask: logits(model, hidden, -1))
    core = diffusion_engine(sure)
    core.add_request(requests()[0])
    with pytest.raises(AssertionError, match="unfinished after 200 steps"):
        drain(core, max_steps=200)
