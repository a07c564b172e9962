"""`LLM` of bidirectional diffusion models, from directories as their publishers write them."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxinfer import LLM, BeamSearchParams, SamplingParams
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.export import export_hf
from jaxinfer.models.rope import RopeConfig
from tests.builders import BIDIRECTIONAL_FAMILIES, model_config, random_model, random_prompts
from tests.diffusion import vicinity_numpy as loop
from tests.diffusion.oracle import by_threshold

MASK, BLOCK, LOOKS = 100, 8, {"prefix_look": 3, "after_look": 2}
CONFIG = {"block_size": BLOCK, "threshold": 0.2, "cont_weight": 0.3, "warmup_steps": 2, **LOOKS}
LIMITS = {
    "dtype": "float32", "max_model_len": 96, "max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_tokens": 512,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module", params=sorted(BIDIRECTIONAL_FAMILIES))
def directory(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    rope = RopeConfig(max_position_embeddings=256, original_max_position_embeddings=256)
    config = model_config(request.param, mask_token_id=MASK, hidden_size=64, rope=rope)
    export_hf(random_model(config, seed=5), config, folder)
    return folder


@pytest.fixture(scope="module")
def llm(directory) -> LLM:
    found = LLM(directory, **LIMITS, diffusion_config=CONFIG)
    found.warm_up(use_tqdm=False)
    return found


def prompts(*lengths: int) -> list[list[int]]:
    return random_prompts(lengths, vocab_size=MASK)


def tokens_of(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0].token_ids


def test_prompts_are_answered_as_by_the_loop(directory, llm):
    some = prompts(9, 30, 2)
    outputs = llm.generate(some, GREEDY, use_tqdm=False)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    if llm.model_config.experts is None:  # which the loop does not have
        _, model = load_checkpoint(directory, dtype="float32")
        assert [output.outputs[0].token_ids for output in outputs] == [
            loop.generate(
                model, prompt, 20, block_size=BLOCK, rule=by_threshold, threshold=0.2, cache="dual", **LOOKS,
                smooth=loop.Smooth(warmup_steps=2),
            ).tokens
            for prompt in some
        ]  # fmt: skip
    assert [output.outputs[0].token_ids for output in outputs] == [tokens_of(llm, prompt) for prompt in some]
    assert llm.get_metrics().diffusion_tokens_per_forward > 0


def test_samples_of_a_prompt_are_those_of_their_seeds(llm):
    (prompt,) = prompts(21)
    (output,) = llm.generate([prompt], SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=10), use_tqdm=False)
    alone = [tokens_of(llm, prompt, SamplingParams(seed=5 + i, temperature=1.0, max_tokens=10)) for i in range(3)]
    assert [completion.token_ids for completion in output.outputs] == alone
    assert len(set(map(tuple, alone))) > 1


def test_branches_are_answered_as_if_alone(llm):
    prefix, *suffixes = prompts(19, 1, 6, 5)
    output = llm.generate_branches(prefix, suffixes, GREEDY)
    assert [branch.token_ids for branch in output.outputs] == [tokens_of(llm, prefix + each) for each in suffixes]


def test_streams_bring_blocks(llm):
    (prompt,) = prompts(11)
    deltas = [delta.outputs[0].token_ids for delta in llm.stream(prompt, GREEDY)]
    assert [len(delta) for delta in deltas if delta] == [8, 8, 4]
    assert sum(deltas, []) == tokens_of(llm, prompt)


def test_log_probabilities_come_with_tokens(llm):
    (prompt,) = prompts(11)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    found = output.outputs[0].logprobs
    assert found is not None and len(found) == 12
    assert all(entry[token].logprob <= 0 for entry, token in zip(found, output.outputs[0].token_ids, strict=True))


def test_nothing_compiles_after_warm_up(llm):
    for params in (SamplingParams(max_tokens=15, logprobs=2), GREEDY):
        llm.generate(prompts(9, 30, 2, 17, 8), params, use_tqdm=False)
    assert llm.get_metrics().num_compiles_after_warm_up_total == 0


def test_its_keys_and_values_are_never_shared(llm):
    assert not llm.core.config.enable_prefix_caching and llm.core.prefix_cache is None


def test_what_goes_from_token_to_token_is_refused_by_name(llm):
    with pytest.raises(ValueError, match="presence_penalty=0.1 is not for diffusion models"):
        llm.generate(prompts(5), SamplingParams(presence_penalty=0.1), use_tqdm=False)
    with pytest.raises(ValueError, match="diffusion"):
        llm.beam_search(prompts(5), BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(ValueError, match=r"prompt 0 has the mask token \(100\)"):
        llm.generate([[1, MASK]], GREEDY, use_tqdm=False)


def test_what_cannot_be_is_refused(directory):
    for fields, message in (
        ({"edit_threshold": 0.5}, "edit_threshold is for models that were trained to edit"),
        ({"cache": "all"}, "cache must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(directory, **LIMITS, diffusion_config=fields)
    with pytest.raises(ValueError, match="denoises blocks: nothing is drafted"):
        LLM(directory, speculative_config={"method": "ngram"})


def test_a_request_longer_than_a_launch_is_refused(llm):
    with pytest.raises(ValueError, match="may grow to 80 tokens, and a bidirectional model computes them all at once"):
        llm.generate(prompts(60), GREEDY, use_tqdm=False)
    assert len(tokens_of(llm, prompts(30)[0])) == 20


def test_blocks_have_32_tokens_unless_said_otherwise(directory):
    llm = LLM(directory, **LIMITS)
    assert llm.core.strategy.vicinity.block_size == 32  # pyright: ignore[reportAttributeAccessIssue]
    assert llm.core.strategy.vicinity.cache == "dual"  # pyright: ignore[reportAttributeAccessIssue]
    assert llm.model_config.is_bidirectional and jnp.dtype("float32") == llm.core.kv.k[0].dtype
