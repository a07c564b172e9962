"""`LLM` of a block-diffusion model, from a directory as its publishers write it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer import LLM, BeamSearchParams, DiffusionConfig, SamplingParams
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.limits import BRANCH_MODES
from tests.builders import random_prompts
from tests.diffusion import oracle
from tests.speculative import decoder_numpy
from tests.speculative.decoder_numpy import Checkpoint

MASK, BLOCK, VOCAB = 60, 4, 61
CONFIG = {"threshold": 0.1, "expected_tpf": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=15)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    config, tensors = decoder_numpy.random_target(
        np.random.default_rng(2), qk_norm=True, num_layers=3, vocab_size=VOCAB
    )
    config = {
        **config, "architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": BLOCK,
        "mask_token_id": MASK, "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
    }  # fmt: skip
    return Checkpoint(config, tensors)


@pytest.fixture(scope="module")
def directory(checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdar")
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    save_file(dict(checkpoint.tensors), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def llm(directory) -> LLM:
    return LLM(directory, dtype="float32", diffusion_config=CONFIG, max_num_batched_tokens=64, max_num_seqs=100)


@pytest.fixture(scope="module")
def model(directory):
    return load_checkpoint(directory, dtype="float32")[1]


def prompts(*lengths: int) -> list[list[int]]:
    return random_prompts(lengths, vocab_size=MASK)


def test_logits_are_those_of_numpy(checkpoint, model):
    (ids,) = prompts(24)
    ids[9] = ids[22] = ids[23] = MASK
    wanted = decoder_numpy.forward(checkpoint, ids, ()).logits
    got = oracle.block_logits(model, ids, 0)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
    causal = Checkpoint({**checkpoint.config, "block_size": 1}, checkpoint.tensors)
    assert np.abs(decoder_numpy.forward(causal, ids, ()).logits - wanted).max() > 0.1


def test_prompts_are_answered_block_by_block(llm, model):
    some = prompts(9, 30, 2)
    outputs = llm.generate(some, GREEDY, use_tqdm=False)
    rule = oracle.by_threshold(0.1)
    assert [output.outputs[0].token_ids for output in outputs] == [
        oracle.generate(model, prompt, 15, rule).tokens for prompt in some
    ]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    metrics = llm.get_metrics()
    assert metrics.diffusion_tokens_per_forward > 1 / BLOCK
    assert "jaxinfer:diffusion_tokens_per_forward" in metrics.prometheus()


def test_samples_of_a_prompt_are_those_of_their_seeds(llm):
    """They share what their prompts begin with."""
    (prompt,) = prompts(21)
    (output,) = llm.generate([prompt], SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=10), use_tqdm=False)
    alone = [
        llm.generate([prompt], SamplingParams(seed=5 + i, temperature=1.0, max_tokens=10), use_tqdm=False)
        for i in range(3)
    ]
    assert [completion.token_ids for completion in output.outputs] == [one.outputs[0].token_ids for (one,) in alone]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1


@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_branches_are_batched_whatever_is_asked_for(llm, mode):
    prefix, *suffixes = prompts(24, 1, 6, 5)
    expected = llm.generate_branches(prefix, suffixes, GREEDY)
    found = llm.generate_branches(prefix, suffixes, GREEDY, branch_mode=mode)
    assert [branch.token_ids for branch in found.outputs] == [branch.token_ids for branch in expected.outputs]
    assert llm.get_metrics().num_step_failures_total == 0
    llm.core.check_integrity()


def test_branches_are_answered_as_if_alone(llm):
    prefix, *suffixes = prompts(19, 1, 6, 5)
    output = llm.generate_branches(prefix, suffixes, GREEDY)
    alone = llm.generate([prefix + suffix for suffix in suffixes], GREEDY, use_tqdm=False)
    assert [branch.token_ids for branch in output.outputs] == [one.outputs[0].token_ids for one in alone]


def test_streams_bring_blocks(llm):
    (prompt,) = prompts(8)
    deltas = [delta.outputs[0].token_ids for delta in llm.stream(prompt, GREEDY)]
    assert [len(delta) for delta in deltas if delta] == [4, 4, 4, 3]
    assert sum(deltas, []) == llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_streams_bring_each_round_of_their_blocks(llm):
    (prompt,) = prompts(8)
    params = SamplingParams(temperature=0.0, max_tokens=15, return_blocks=True, n=2)
    whole = llm.generate([prompt], params, use_tqdm=False)[0].outputs
    deltas = [part for delta in llm.stream(prompt, params) for part in delta.outputs]
    for index in range(2):
        blocks = [block for part in deltas if part.index == index for block in part.blocks]
        assert blocks == whole[index].blocks
        # After its last round, a block has the tokens that land.
        last = {block.first: block.token_ids for block in blocks}
        assert [token for first in sorted(last) for token in last[first]] == whole[index].token_ids
        assert [block.token_ids.count(None) for block in blocks if block.first == 0] != [0]
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].blocks is None


def test_it_runs_as_many_requests_as_it_computes_blocks_for(llm):
    assert llm.core.config.max_num_seqs == 64 // BLOCK


def test_nothing_compiles_after_warm_up(directory):
    llm = LLM(
        directory, dtype="float32", diffusion_config=CONFIG, max_num_batched_tokens=32, max_num_seqs=4,
        max_model_len=64, kv_cache_tokens=256,
    )  # fmt: skip
    llm.warm_up(use_tqdm=False)
    llm.generate(prompts(9, 30, 2, 17, 8, 40), SamplingParams(max_tokens=15, logprobs=2), use_tqdm=False)
    llm.generate(prompts(9, 30, 2, 17, 8, 40), GREEDY, use_tqdm=False)
    assert llm.get_metrics().num_compiles_after_warm_up_total == 0


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}, {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]}, {"min_tokens": 1}, {"prompt_logprobs": 1},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_what_goes_from_token_to_token_is_refused_by_name(field, llm):
    with pytest.raises(ValueError, match=f"{next(iter(field))}=.* is not for diffusion models"):
        llm.generate(prompts(5), SamplingParams(**field), use_tqdm=False)


def test_prompts_have_no_masks(llm):
    with pytest.raises(ValueError, match=r"prompt 1 has the mask token \(60\)"):
        llm.generate([[1, 2], [3, MASK]], GREEDY, use_tqdm=False)


def test_beam_search_is_refused(llm):
    with pytest.raises(ValueError, match="diffusion"):
        llm.beam_search(prompts(5), BeamSearchParams(beam_width=2, max_tokens=4))


def test_configurations_that_do_not_fit_are_refused(directory):
    with pytest.raises(ValueError, match="block_size=8: the model was trained with blocks of 4"):
        LLM(directory, diffusion_config={"block_size": 8})
    with pytest.raises(ValueError, match="cache='dual': tokens of SDARForCausalLM see no later block"):
        LLM(directory, diffusion_config={"cache": "dual"})
    for name in ("prefix_look", "after_look", "cont_weight"):
        with pytest.raises(ValueError, match=f"{name}=1 is for bidirectional models, not SDARForCausalLM"):
            LLM(directory, diffusion_config={name: 1})
    with pytest.raises(ValueError, match="SDARForCausalLM denoises blocks: nothing is drafted"):
        LLM(directory, speculative_config={"method": "ngram"})
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is no diffusion model"):
        LLM(diffusion_config=DiffusionConfig())
    with pytest.raises(ValueError, match="page_size"):
        LLM(directory, page_size=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": 1.5}, "threshold must be a probability"),
        ({"threshold": True}, "threshold must be a probability"),
        ({"edit_threshold": -0.1}, "edit_threshold must be a probability"),
        ({"factor": -1.0}, "factor must be 0 or more"),
        ({"unmask": "anything"}, "unmask must be one of threshold, hierarchy, factor, credit"),
        ({"unmask": "hierarchy", "low_threshold": 0.95}, "low_threshold .* must be at most threshold"),
        ({"cache": "all"}, "cache must be one of auto, none, prefix, dual"),
        ({"prefix_look": -1}, "prefix_look must be an integer of 0 or more"),
        ({"after_look": 1.5}, "after_look must be an integer of 0 or more"),
        ({"warmup_steps": True}, "warmup_steps must be an integer of 0 or more"),
        ({"cont_weight": -0.3}, "cont_weight must be 0 or more"),
        ({"threshold_decay": float("inf")}, "threshold_decay must be 0 or more"),
        ({"decay_beta": 1.1}, "decay_beta must be a probability"),
        ({"credit_alpha": "0.7"}, "credit_alpha must be 0 or more"),
        ({"maximum_unroll": 0}, "maximum_unroll must be"),
        ({"expected_tpf": 1.5}, "expected_tpf must be"),
        ({"early_stop": 1}, "early_stop must be True or False"),
        ({"steps": 3}, "diffusion_config has no field 'steps'"),
        ("fast", "diffusion_config must be a DiffusionConfig or a dict"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        DiffusionConfig.of(fields)
