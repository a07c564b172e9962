"""Block-causal models in the textbook worker: iterations over canvases whose tokens all see each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.diffusion import canvas_rounds
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.strategies.block_diffusion import denoising_of
from jaxinfer.textbook.diffusion.batches import ForwardBatch
from jaxinfer.textbook.diffusion.sequence_rows import SequenceRows
from jaxinfer.textbook.diffusion.worker import DiffusionWorker
from tests.builders import random_model
from tests.diffusion import vicinity_numpy as loop
from tests.diffusion.bidirectional_builders import diffusion_config
from tests.diffusion.builders import BLOCK as TRAINED_BLOCK
from tests.diffusion.builders import diffusion_model_config
from tests.textbook.diffusion.builders import WAYS, batch_of, check_iterations, decoded, drive, worker_of

WAY = "vicinity smoothed"


@pytest.fixture(scope="module")
def models() -> Callable[[str], DecoderLM]:
    return functools.cache(lambda family: random_model(diffusion_model_config(family, num_layers=2), seed=5))


@pytest.fixture(scope="module")
def model(models) -> DecoderLM:
    return models("LLaDA2MoeModelLM")


@pytest.mark.parametrize("family", ["LLaDA2MoeModelLM", "SDARForCausalLM"])
def test_every_iteration_is_that_of_the_loop(family, models):
    """Tokens, logits, weights, thresholds, and which iterations compute the whole sequence."""
    iteration = worker_of(models(family), **WAYS[WAY]).iteration
    batch, wanted = ForwardBatch.init_new(batch_of(), iteration), decoded(models(family), WAYS[WAY])
    assert {each.kind for found in wanted for each in found.rounds} == {"whole", "refresh", "window"}
    check_iterations(iteration, batch, iteration.allocate_prefill_state(batch), wanted)


@pytest.mark.parametrize("way", [way for way in WAYS if way != WAY])
def test_tokens_and_counters_are_those_of_the_loop(way, model):
    tokens, state = drive(worker_of(model, **WAYS[way]), batch_of())
    wanted = decoded(model, WAYS[way])
    assert tokens == [found.tokens for found in wanted] == state.output_ids
    assert state.iteration_counters == [len(found.rounds) for found in wanted]


# That masks are never drawn shows with a model that is sure of masks, see the bidirectional models' planted bugs.
@pytest.mark.parametrize("bug", [bug for bug in loop.BUGS if bug != "mask_drawn"])
def test_a_wrong_loop_does_other_rounds(bug, model):
    right, wrong = (decoded(model, WAYS[WAY], bug=planted) for planted in ("", bug))
    assert [each.rounds for each in wrong] != [each.rounds for each in right]


def causal_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    widen = canvas_rounds._with_windows

    def bug(batch, own, runs, where, how, **sizes):
        wide = widen(batch, own, runs, where, how, **sizes)
        count = own.windows.size
        limit, place = wide.limit[:count], wide.positions[:count]
        end = jnp.minimum(limit, place // TRAINED_BLOCK * TRAINED_BLOCK + TRAINED_BLOCK - 1)
        return replace(wide, limit=wide.limit.at[:count].set(end))

    monkeypatch.setattr(canvas_rounds, "_with_windows", bug)


def causal_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = SequenceRows.rests

    def bug(self, rows, computed):
        packed, begins = rests(self, rows, computed)
        end = packed["positions"] // TRAINED_BLOCK * TRAINED_BLOCK + TRAINED_BLOCK - 1
        packed["limit"][:] = [min(pair) for pair in zip(packed["limit"].tolist(), end.tolist(), strict=True)]
        return packed, begins

    monkeypatch.setattr(SequenceRows, "rests", bug)


@pytest.mark.parametrize("bug", [causal_windows, causal_wholes], ids=lambda bug: bug.__name__)
def test_a_mask_of_blocks_on_the_canvas_is_noticed(bug, model, monkeypatch):
    bug(monkeypatch)
    iteration = worker_of(model, **WAYS[WAY]).iteration
    batch = ForwardBatch.init_new(batch_of(), iteration)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_iterations(iteration, batch, iteration.allocate_prefill_state(batch), decoded(model, WAYS[WAY]))


def test_blocks_are_those_that_the_model_was_trained_with_unless_given(model):
    assert DiffusionWorker(None, None, model=model).iteration.vicinity.block_size == TRAINED_BLOCK
    assert worker_of(model).iteration.vicinity.block_size != TRAINED_BLOCK


@pytest.mark.parametrize("name", ["prefix_look", "cont_weight"])
def test_the_engine_refuses_and_names_the_worker(name, model):
    reason = rf"{name}=1 is for bidirectional models, not LLaDA2MoeModelLM.*exact in LLM; jaxinfer.diffusion.Diffusion"
    with pytest.raises(ValueError, match=reason):
        denoising_of(diffusion_config(block_size=TRAINED_BLOCK, **{name: 1}), model.config)
