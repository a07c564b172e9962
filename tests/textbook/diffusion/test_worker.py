"""The textbook worker and its iterations, driven as by a script, match the engine and the loop in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint.export import export_hf
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.rope import RopeConfig
from jaxinfer.textbook.diffusion.batches import ForwardBatch, ModelWorkerBatch
from jaxinfer.textbook.diffusion.iteration import DiffusionBlockMeta, DiffusionIteration
from jaxinfer.textbook.diffusion.sequence_rows import rounded_up
from jaxinfer.textbook.diffusion.worker import DiffusionWorker
from tests.builders import make_request, model_config, random_model, run_requests
from tests.diffusion import vicinity_numpy as loop
from tests.diffusion.builders import MASK, diffusion_engine
from tests.diffusion.oracle import by_threshold
from tests.textbook.diffusion.builders import (
    BLOCK,
    MAX_NEW_TOKENS,
    PROMPTS,
    SEEDS,
    TEMPERATURE,
    THRESHOLD,
    WAYS,
    batch_of,
    check_iterations,
    decoded,
    drive,
    settings,
    worker_of,
)


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(model_config("LLaDAModelLM", mask_token_id=MASK), seed=5)


@pytest.fixture(scope="module")
def workers(model) -> Callable[[str], DiffusionWorker]:
    """One worker for each way: most of what they cost is compiling."""
    return functools.cache(lambda way: worker_of(model, **WAYS[way]))


def of_engine(model: DecoderLM, way: dict[str, Any], batch: ModelWorkerBatch) -> list[list[int]]:
    """What the engine makes of a batch."""
    config = DiffusionConfig(
        **{"block_size": BLOCK, "threshold": THRESHOLD, "expected_tpf": 2, "cont_weight": 0.3, **way}
    )
    core = diffusion_engine(model, config, max_model_len=80, max_num_batched_tokens=128, kv_cache_tokens=320)
    rows = zip(batch.input_ids, MAX_NEW_TOKENS, TEMPERATURE, SEEDS, strict=False)
    requests = [
        make_request(str(index), prompt, max_tokens=count, temperature=temperature, seed=seed)
        for index, (prompt, count, temperature, seed) in enumerate(rows)
    ]
    return run_requests(core, requests)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_counters_are_those_of_the_loop(way, model, workers):
    tokens, state = drive(workers(way), batch_of())
    wanted = decoded(model, WAYS[way])
    assert tokens == [found.tokens for found in wanted] == state.output_ids
    assert state.iteration_counters == [len(found.rounds) for found in wanted]


@pytest.mark.parametrize("way", ["dual", "vicinity smoothed"])
def test_tokens_are_those_of_the_engine(way, model, workers):
    assert drive(workers(way), batch_of())[0] == of_engine(model, WAYS[way], batch_of())


def test_a_sequence_ends_with_the_block_of_its_first_ending_token(model, workers):
    worker = workers("vicinity")
    eos = tuple(found.tokens[8] for found in decoded(model, WAYS["vicinity"])[:2])
    tokens, state = drive(worker, batch_of(eos))
    assert tokens == [found.tokens for found in decoded(model, WAYS["vicinity"], eos)]
    assert len(tokens[0]) <= 9 and tokens[0][-1] in eos
    with pytest.raises(ValueError, match="all requests of the batch have ended"):
        worker.extend(batch_of(eos), state)


def test_requests_that_have_ended_get_nothing_while_others_go_on(workers):
    worker = workers("dual")
    state = worker.prefill(batch_of()).batch_state
    results = [worker.extend(batch_of(), state) for _ in range(4)]
    assert [len(result.next_token_ids[2]) for result in results] == [6, 3, 0, 0]
    assert [len(result.next_token_ids[0]) for result in results] == [6, 6, 6, 2]
    assert results[-1].iterations[2] == 0 < results[-1].iterations[0] and state.is_finished


def test_the_methods_of_an_iteration_do_alone_what_a_worker_does(model, workers):
    iteration = workers("vicinity smoothed").iteration
    batch = ForwardBatch.init_new(batch_of(), iteration)
    state, wanted = iteration.allocate_prefill_state(batch), decoded(model, WAYS["vicinity smoothed"])
    assert state.kv_handles[0] == [0, 1, 2, 3, 4, 5, 6] and state.iteration_counters == [0, 0, 0]
    assert state.block_windows[:2] == [DiffusionBlockMeta(0, 0, 30, 36), DiffusionBlockMeta(0, 1, 36, 42)]
    table = np.asarray(model.embed.embedding[...])
    np.testing.assert_array_equal(state.prompt_embeddings[1, :7], table[PROMPTS[1]])
    assert not np.any(state.prompt_embeddings[1, 7:])
    check_iterations(iteration, batch, state, wanted)


def test_logits_of_sequences_that_rest_are_those_of_their_last_iteration(workers):
    """One block takes more iterations than another, in the same launches."""
    worker = workers("dual")
    state = worker.prefill(batch_of()).batch_state
    together = np.asarray(worker.extend(batch_of(), state).logits_output)
    alone = worker.iteration.allocate_prefill_state(worker._create_forward_batch(batch_of()))
    for block in alone.current_blocks():
        batch, logits = worker._create_forward_batch(batch_of()), None
        while alone.canvas[block.req_index][block.start : block.end].count(MASK):
            number = alone.iteration_counters[block.req_index]
            logits = worker.iteration.run_iteration_step(batch, alone, block, number).logits
        np.testing.assert_allclose(together[block.req_index], logits, atol=1e-4)


def test_the_example_of_the_source(model):
    """An iteration beside the worker, a state that is not prefilled, objects with any attributes."""
    server_args = SimpleNamespace(tp_size=1, ep_size=1, pp_size=1)
    config = SimpleNamespace(hidden_size=model.config.hidden_size, block_size=BLOCK)
    iteration = DiffusionIteration(
        model=model, hidden_size=config.hidden_size, block_size=config.block_size, maximum_unroll=4, expected_tpf=8,
        warmup_steps=2, cont_weight=0.3, cont_weight_init=0.15, cont_weight_growth=0.02, threshold_decay=0.02,
        graph_runner=None, device=jax.default_backend(),
    )  # fmt: skip
    worker = DiffusionWorker(
        server_args=server_args, model_config=config, gpu_id=0, tp_rank=0, pp_rank=0, moe_ep_rank=0,
        graph_runner=None, enable_cuda_graph_sampling=False, model=model, warmup_steps=2,
    )  # fmt: skip
    batch = SimpleNamespace(input_ids=PROMPTS[1:2], max_new_tokens=8)
    result = worker.prefill(batch)
    assert result.next_token_ids == [[]] and result.logits_output.shape == (1, BLOCK, model.config.vocab_size)
    state = iteration.allocate_prefill_state(ForwardBatch.init_new(batch, worker))
    tokens = worker.extend(batch, state).next_token_ids
    assert tokens == worker.extend(batch, result.batch_state).next_token_ids and len(tokens[0]) == BLOCK
    assert tokens[0] == loop.generate(
        model, PROMPTS[1], 8, block_size=BLOCK, rule=by_threshold, threshold=0.9, cache="dual", smooth=loop.Smooth(2)
    ).tokens[:BLOCK]  # fmt: skip


def test_a_worker_loads_the_checkpoint_that_its_arguments_name(tmp_path):
    positions = {"max_position_embeddings": 256, "original_max_position_embeddings": 256}
    config = model_config("LLaDAModelLM", mask_token_id=MASK, head_dim=12, rope=RopeConfig(**positions))
    export_hf(random_model(config), config, tmp_path)
    worker = DiffusionWorker(SimpleNamespace(model_path=tmp_path, block_size=4), None)
    assert worker.iteration.vicinity.block_size == 4 and worker.model.config.mask_token_id == MASK
    with pytest.raises(ValueError, match="no model_path"):
        DiffusionWorker(None, None)


def test_experts():
    config = model_config("LLaDAMoEModelLM", mask_token_id=MASK)
    worker = worker_of(random_model(config, seed=5), **WAYS["vicinity smoothed"])
    batch = ModelWorkerBatch(PROMPTS[:1], MAX_NEW_TOKENS[:1])
    tokens, _ = drive(worker, batch)
    assert tokens == of_engine(worker.model, WAYS["vicinity smoothed"], batch) and MASK not in tokens[0]


REFUSED = {
    "pp_rank must be 0, got 1": {"pp_rank": 1},
    "tp_rank must be 0, got 2": {"tp_rank": 2},
    "moe_ep_rank must be 0": {"moe_ep_rank": 1},
    "gpu_id must be 0": {"gpu_id": 3},
    "pp_size must be 1, got 2": {"server_args": SimpleNamespace(pp_size=2)},
    "enable_cuda_graph_sampling must be False: XLA": {"enable_cuda_graph_sampling": True},
    "graph_runner must be None: XLA": {"graph_runner": object()},
    "device must be one of cpu:0.*or a jax.Device, got 'abacus'": {"device": "abacus"},
    "hidden_size must be the model's, 48, got 4096": {"model_config": SimpleNamespace(hidden_size=4096)},
    "page_size must be an integer of at least 1": {"page_size": 0},
    "threshold must be a probability": {"threshold": 2.0},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_worker_cannot_have_is_refused_by_name(reason, model):
    with pytest.raises(ValueError, match=reason):
        DiffusionWorker(**{"server_args": None, "model_config": None, "model": model, **REFUSED[reason]})


@pytest.mark.parametrize("family", ["Qwen3ForCausalLM", "BailingMoeV2ForCausalLM"])
def test_autoregressive_models_are_refused_by_name(family):
    reason = (
        f"{family}, which is no bidirectional.*it has no mask token, and its causal weights.*do not denoise; allowed"
    )
    with pytest.raises(ValueError, match=reason):
        DiffusionWorker(None, None, model=random_model(model_config(family)))


BAD_BATCHES = {
    "at least one prompt": {"input_ids": []},
    "prompt 1 is empty": {"input_ids": [[1], []]},
    "prompt 0 has the mask token, 100": {"input_ids": [[MASK]]},
    "prompt 0 has tokens outside the vocabulary of 101": {"input_ids": [[101]]},
    "request 0 may grow to 301 tokens, and the model has 256": {"max_new_tokens": 300},
    "max_new_tokens must be an integer of at least 1": {"max_new_tokens": 0},
    "temperature must be 0 or more": {"temperature": -1.0},
    "seeds has 2 entries for 1 requests": {"seeds": [1, 2]},
    "top_p has 2 entries for 1 requests": {"top_p": [1.0, 1.0]},
    "top_k has 3 entries for 1 requests": {"top_k": [1, 2, 3]},
    r"top_p must be a number in \(0, 1\], got 0.0": {"top_p": 0.0},
    "top_k must be an integer: -1 or 0 .off. or at least 1, got -2": {"top_k": -2},
    "top_k must be an integer: .*, got 1.5": {"top_k": [1.5]},
}


@pytest.mark.parametrize("reason", BAD_BATCHES)
def test_bad_batches_are_refused_by_name(reason, model):
    with pytest.raises(ValueError, match=reason):
        worker_of(model).prefill(SimpleNamespace(**{"input_ids": [[1]], **BAD_BATCHES[reason]}))


def test_calls_out_of_order_are_refused(model):
    iteration = DiffusionIteration(model, model.config.hidden_size, **settings())
    batch = ForwardBatch.init_new(ModelWorkerBatch([[1, 2, 3]], 12), iteration)
    state = iteration.allocate_prefill_state(batch)
    first, second = state.block_windows
    with pytest.raises(ValueError, match="block 1 of request 0 cannot be denoised: it is at block 0"):
        iteration.run_iteration_step(batch, state, second, 0)
    with pytest.raises(ValueError, match="iter_no must be 0 or more, got -1"):
        iteration.run_iteration_step(batch, state, first, -1)
    with pytest.raises(ValueError, match="block 0 of request 0 has 6 masks left"):
        iteration.finalize_block(batch, state, first)
    two = ForwardBatch.init_new(ModelWorkerBatch([[1], [2]], 12), iteration)
    with pytest.raises(ValueError, match="a batch of 2 for a state of 1 requests"):
        iteration.run_iterations(two, state, [first])
    iteration.run_prefill_forward(batch, state)
    with pytest.raises(ValueError, match="has been prefilled"):
        iteration.run_prefill_forward(batch, state)


def test_one_seed_for_a_batch_counts_on(model):
    worker = worker_of(model)
    batch = ForwardBatch.init_new(ModelWorkerBatch([[1], [2]], seeds=2**32 + 4), worker)
    assert batch.request_keys == [(1, 4), (1, 5)] and batch.eos_token_ids == frozenset(model.config.eos_token_ids)
    assert ForwardBatch.init_new(SimpleNamespace(input_ids=[[1]]), worker).request_keys == [(0, 0)]


def test_sizes_of_launches_are_few():
    assert [rounded_up(size, 1) for size in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 16]
    assert [rounded_up(size, 4) for size in (1, 16, 17, 20, 21, 33)] == [1, 16, 20, 20, 24, 40]
