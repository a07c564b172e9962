"""Padded rounds give the tokens that an engine gives in both of its modes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxinfer import LLM
from jaxinfer.checkpoint import export_hf
from jaxinfer.models.rope import RopeConfig
from jaxinfer.textbook.branching import decode_branches
from tests.builders import model_config, random_model, random_prompts
from tests.oracle import greedy_tokens

MODES = ("padded", "batching", "in_one_sequence")


def decoded_in_all_modes(llm: LLM, prefix: Sequence[int], branches: Sequence[Sequence[int]], whole: list[list[int]]):
    """What all modes decode of three branches that end apart, two at once, and what of `whole` that should be."""
    stop, limits = whole[2][5], [3, 8, 8]
    ends = [tokens.index(stop) + 1 if stop in tokens else 8 for tokens in whole]
    wanted = [tokens[: min(end, limit)] for end, limit, tokens in zip(ends, limits, whole, strict=True)]
    assert len(set(map(len, wanted))) > 1 and len(wanted[2]) <= 6
    found = [
        decode_branches(llm, prefix, branches, limits, mode, stop_token_ids=[stop], max_parallel_branches=2)
        for mode in MODES
    ]
    return found, [wanted] * 3


def test_all_three_modes_have_the_oracles_tokens_where_branches_end_apart_and_join_late(tmp_path: Path):
    # A rotary configuration that Hugging Face's format expresses.
    rope = RopeConfig(max_position_embeddings=256, original_max_position_embeddings=256)
    model = random_model(model_config(rope=rope))
    export_hf(model, model.config, tmp_path)
    llm = LLM(tmp_path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32,
              kv_cache_tokens=256)  # fmt: skip
    prefix, *branches = random_prompts([21, 3, 1, 6])
    whole = [greedy_tokens(model, [*prefix, *branch], 8) for branch in branches]
    found, wanted = decoded_in_all_modes(llm, prefix, branches, whole)
    assert found == wanted
    assert [decode_branches(llm, prefix, branches, 8, mode) for mode in MODES] == [whole] * 3


@pytest.mark.slow
def test_all_three_modes_have_the_same_tokens_of_the_embedded_checkpoint():
    # Limits of tests/test_mode_consistency.py: in one run, their programs are compiled once.
    llm = LLM(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=16, kv_cache_tokens=2048)
    encode = llm.get_tokenizer().encode
    prefix = encode("How to repair a bicycle\n1. Find the fault: Find out where the damage is.\n")
    texts = ("2. Collect the tools:", "2.", "2. Take off the wheels: Loosen")
    branches = [encode(text, add_special_tokens=False) for text in texts]
    whole = decode_branches(llm, prefix, branches, 8, "batching")
    found, wanted = decoded_in_all_modes(llm, prefix, branches, whole)
    assert found == wanted
