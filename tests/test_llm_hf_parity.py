"""`LLM` gives the greedy tokens that Hugging Face's implementations gave, prompts batched, whole and in chunks."""

from __future__ import annotations

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import convert_checkpoint
from tests.hf_fixtures import NAMES, checkpoint_path, expected

# One of every family in the default run, since each engine compiles its own programs; and few programs where a step
# has room for all prompts at once. A budget of 64 tokens cuts prompts into chunks.
QUICK = {"llama3_tied": 256, "qwen2_linear_sharded": 256, "qwen3_dynamic": 64}


@pytest.mark.parametrize(
    ("name", "budget"),
    [*QUICK.items(), *(pytest.param(name, budget, marks=pytest.mark.slow) for name in NAMES for budget in (64, 256))],
)
def test_greedy_tokens_match(name, budget, tmp_path):
    recorded = expected(name)
    convert_checkpoint(checkpoint_path(name), tmp_path / "converted", progress=False)
    llm = LLM(
        tmp_path / "converted", skip_tokenizer_init=True, max_num_seqs=8, max_num_batched_tokens=budget,
        max_model_len=160, kv_cache_tokens=8 * 160,
    )  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in recorded.prompts],
        SamplingParams(temperature=0, max_tokens=len(recorded.greedy[0]), ignore_eos=True),
        use_tqdm=False,
    )
    assert [output.outputs[0].token_ids for output in outputs] == recorded.greedy
