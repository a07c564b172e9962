"""Temperature, top-p and top-k in the textbook worker: in the programs of its iterations, and in `_sample`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.textbook.diffusion.batches import ForwardBatch, ModelWorkerBatch
from jaxinfer.textbook.diffusion.worker import DiffusionWorker
from tests.builders import model_config, random_model
from tests.diffusion.builders import MASK
from tests.sampling.checker import WrongDistributionError, check_draws
from tests.sampling.reference import Filters, probabilities_of
from tests.textbook.diffusion.builders import BLOCK, PLAIN, WAYS, batch_of, decoded, drive, worker_of

WORDS = 7  # of a small vocabulary, the last of which is the mask
FILTERS = {
    "temperature": Filters(0.7),
    "top_k": Filters(1.0, top_k=2),
    "top_p": Filters(1.0, top_p=0.8),
    "all": Filters(1.4, top_k=4, top_p=0.85),
}
TEMPERATURE = [0.6, 1.5, 0.0]
TOP_P, TOP_K = [0.7, 1.0, 0.2], [0, 3, 1]


@pytest.fixture(scope="module")
def small() -> DecoderLM:
    return random_model(model_config("LLaDAModelLM", vocab_size=WORDS, mask_token_id=WORDS - 1), seed=5)


@pytest.fixture(scope="module")
def worker() -> DiffusionWorker:
    return worker_of(random_model(model_config("LLaDAModelLM", mask_token_id=MASK), seed=5), **WAYS["dual"])


def many(worker: DiffusionWorker, filters: Filters, count: int, **more: Any) -> ForwardBatch:
    """Equal prompts with different seeds."""
    batch = ModelWorkerBatch(
        [[1, 2]] * count, 1, filters.temperature, 0, (), top_p=filters.top_p, top_k=filters.top_k, **more
    )
    return ForwardBatch.init_new(batch, worker)


def without_mask(logits: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(logits)) == WORDS - 1, -np.inf, logits)


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_sampled_from_the_distribution_that_the_filters_keep(name, small):
    """Logits may find the mask the likeliest: it is never sampled."""
    worker, draws = DiffusionWorker(None, None, model=small), 8192
    logits = np.asarray([0.1, 1.3, -0.7, 0.9, 1.1, -1.5, 4.0], np.float32)
    batch = many(worker, FILTERS[name], draws)
    tokens = np.asarray(worker._sample(np.tile(logits, (draws, 1)), batch))
    assert tokens.shape == (draws,) and tokens.dtype == np.int32
    check_draws(tokens, probabilities_of(without_mask(logits), FILTERS[name]))
    with pytest.raises(WrongDistributionError):
        check_draws(tokens, probabilities_of(without_mask(logits), Filters(1.0)))


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_iterations_draw_from_the_distribution_that_the_filters_keep(name, small):
    worker, draws = DiffusionWorker(None, None, model=small, block_size=1, page_size=4, **PLAIN), 1024
    batch = many(worker, FILTERS[name], draws)
    state = worker.iteration.allocate_prefill_state(batch)
    logits = np.asarray(worker.iteration.run_prefill_forward(batch, state))[:, 0]
    np.testing.assert_allclose(logits, np.broadcast_to(logits[:1], logits.shape), atol=1e-5)
    tokens = np.asarray([canvas[2] for canvas in state.canvas])
    check_draws(tokens, probabilities_of(logits[0], FILTERS[name]))
    with pytest.raises(WrongDistributionError):
        check_draws(tokens, probabilities_of(logits[0], FILTERS["top_k"]))


def test_filters_of_each_request_are_those_of_the_loop(worker):
    batch = batch_of(temperature=TEMPERATURE, top_p=TOP_P, top_k=TOP_K)
    filters = [
        Filters(heat, top_k=count, top_p=share) for heat, share, count in zip(TEMPERATURE, TOP_P, TOP_K, strict=True)
    ]
    tokens = drive(worker, batch)[0]
    assert tokens == [found.tokens for found in decoded(worker.model, WAYS["dual"], filters=filters)]
    unfiltered = drive(worker, batch_of(temperature=TEMPERATURE, top_p=1.0, top_k=-1))[0]
    assert unfiltered == drive(worker, batch_of(temperature=TEMPERATURE))[0]
    # The third is greedy, and reads no filter.
    assert [own == other for own, other in zip(tokens, unfiltered, strict=True)] == [False, False, True]


def test_the_logits_of_a_prefill_give_the_tokens_that_its_round_drew(worker):
    batch = batch_of(temperature=TEMPERATURE, top_p=TOP_P, top_k=TOP_K)
    result, forward_batch = worker.prefill(batch), ForwardBatch.init_new(batch, worker)
    tokens = np.asarray(worker._sample(result.logits_output, forward_batch))
    assert tokens.shape == (3, BLOCK)
    canvas = np.asarray([result.batch_state.tokens_of(block) for block in result.batch_state.current_blocks()])
    committed = canvas != MASK
    assert committed.any(axis=1).all() and not committed.all()
    np.testing.assert_array_equal(tokens[committed], canvas[committed])
    given = SimpleNamespace(next_token_logits=result.logits_output[:, 0])
    np.testing.assert_array_equal(worker._sample(given, forward_batch), tokens[:, 0])


def test_greedy_tokens_are_the_likeliest_and_never_the_mask(small):
    worker = DiffusionWorker(None, None, model=small)
    logits = np.random.default_rng(0).normal(size=(4, 3, WORDS)).astype(np.float32)
    logits[..., -1] = 9.0
    logits[2, 1] = np.nan
    wanted = logits[..., :-1].argmax(axis=2)
    wanted[2, 1] = NO_SCORE
    np.testing.assert_array_equal(worker._sample(logits, many(worker, Filters(0.0, 1, 0.1), 4)), wanted)


@pytest.mark.parametrize("shape", [(3, WORDS), (4, WORDS - 1), (4, 2, 1), (WORDS,)])
def test_logits_of_another_shape_are_refused(shape, small):
    worker = DiffusionWorker(None, None, model=small)
    reason = rf"logits_output must have the shape \[4, 7\] or \[4, B, 7\], got \[{', '.join(map(str, shape))}\]"
    with pytest.raises(ValueError, match=reason):
        worker._sample(np.zeros(shape, np.float32), many(worker, Filters(), 4))


def test_filters_are_numbers_for_all_requests_or_one_for_each(small):
    worker = DiffusionWorker(None, None, model=small)
    batch = ForwardBatch.init_new(ModelWorkerBatch([[1], [2]], top_p=0.5, top_k=[-1, 9]), worker)
    assert (batch.top_p, batch.top_k) == ([0.5, 0.5], [0, WORDS])
    plain = ForwardBatch.init_new(SimpleNamespace(input_ids=[[1]]), worker)
    assert (plain.top_p, plain.top_k) == ([1.0], [0])
