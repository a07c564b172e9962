"""`LLM` gives the greedy tokens that Hugging Face's implementations gave, prompts batched and cut into chunks."""

from __future__ import annotations

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import convert_checkpoint
from tests.hf_fixtures import NAMES, checkpoint_path, expected

# One of every family in the default run; each engine compiles its own programs.
QUICK = {"llama3_tied", "qwen2_linear_sharded", "qwen3_dynamic"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_greedy_tokens_match(name, tmp_path):
    recorded = expected(name)
    convert_checkpoint(checkpoint_path(name), tmp_path / "converted", progress=False)
    llm = LLM(
        tmp_path / "converted", skip_tokenizer_init=True, max_num_seqs=8, max_num_batched_tokens=64,
        max_model_len=160, kv_cache_tokens=8 * 160,
    )  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in recorded.prompts],
        SamplingParams(temperature=0, max_tokens=len(recorded.greedy[0]), ignore_eos=True),
        use_tqdm=False,
    )
    assert [output.outputs[0].token_ids for output in outputs] == recorded.greedy
