"""Checkpoints of mixtures of experts through the public interface: converted, loaded, answered."""

from __future__ import annotations

import json

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import convert_checkpoint
from tests.hf_fixtures import checkpoint_path, expected


@pytest.mark.parametrize("name", ["qwen3_moe", "bailing_v2"])
def test_an_autoregressive_mixture_gives_the_recorded_tokens(name, tmp_path):
    recorded = expected(name)
    convert_checkpoint(checkpoint_path(name), tmp_path / name, progress=False)
    llm = LLM(tmp_path / name, skip_tokenizer_init=True, max_num_seqs=4, max_num_batched_tokens=64)
    count = len(recorded.greedy[0])
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate(recorded.prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == recorded.greedy


def test_llada2_denoises_blocks_in_pages_that_hold_them(tmp_path):
    """Blocks of 32 tokens, as published, are more than the usual page."""
    for file in checkpoint_path("llada2").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"block_size": 32}))
    llm = LLM(tmp_path, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64)
    assert llm.core.config.page_size == 32
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(3, 40))]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone and all(len(tokens) == 40 for tokens in together)
