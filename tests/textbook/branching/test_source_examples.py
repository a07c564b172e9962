"""The code of SpecSoT's design, written against the package as its reader would, gives the design's numbers."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxinfer.textbook.branching as branching
from jaxinfer.textbook.branching import AlignmentManager, BranchStateManager, DrafterBIM, KVCache
from tests.builders import model_config, random_model, random_prompts

DEVICE = "cpu"


def test_the_names_are_found_and_the_package_alone_loads_no_jax():
    code = "import jaxinfer.textbook.branching, sys; print('jax' in sys.modules, *dir(jaxinfer.textbook.branching))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", *sorted(branching.__all__)]
    assert all(getattr(branching, name).__name__ == name for name in branching.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Branches'"):
        branching.Branches  # noqa: B018


def test_section_2_a_cache_is_appended_to_moved_truncated_and_read_in_place():
    cache = KVCache((1, 2, 16, 4), DEVICE, jnp.float32)
    assert cache.capacity == 16
    cache.append(jnp.arange(80, dtype=jnp.float32).reshape(1, 2, 10, 4))
    assert cache.current_length == 10
    cache.copy(jnp.array([7, 9]), 6)  # two drafts of four are accepted
    assert cache.current_length == 10
    cache.truncate(8)
    valid = cache.get_valid()
    assert valid.shape == (1, 2, 8, 4) and cache.data.shape == (1, 2, 16, 4)
    assert valid[0, 0, :, 0].tolist() == [0, 4, 8, 12, 16, 20, 28, 36]


def test_section_4_the_inputs_of_expand_root_and_grow_tree_have_5_and_50_tokens():
    prefix, *prompts = random_prompts([8, 3, 2, 4, 1, 5])
    state_manager = BranchStateManager(capacity=64, device=DEVICE, use_bim_mode=True)
    state_manager.init_prefix(len(prefix))
    for branch, prompt in enumerate(prompts):
        state_manager.add_branch(branch, prompt)
    drafter = DrafterBIM(random_model(model_config(num_layers=1)), top_k=10, tree_depth=2, capacity=128)

    num_branches = len(state_manager.get_branch_tip_indices())
    expand_input_ids = state_manager.get_tip_token_ids()[None]
    expand_bim = jnp.arange(num_branches)
    expand_positions = state_manager.get_tip_positions()[None]
    history_bim = state_manager.bim[: state_manager.current_length]
    expand_mask = drafter._build_expand_root_mask(query_bim=expand_bim, history_bim=history_bim)
    assert expand_input_ids.tolist() == [[prompt[-1] for prompt in prompts]]
    assert expand_positions.tolist() == [[10, 9, 11, 8, 12]]
    assert expand_mask.shape == (1, 1, 5, 23)
    assert ((expand_mask == 0).sum(-1) == expand_positions + 1).all()  # every position up to its own, once

    draft_bim = jnp.repeat(jnp.arange(num_branches), drafter.top_k)
    draft_positions = jnp.repeat(state_manager.get_tip_positions() + 0 + 1, drafter.top_k)[None]
    draft_mask = drafter._build_grow_tree_mask(
        query_bim=draft_bim, history_bim=history_bim, tree_structure=jnp.eye(50, dtype=bool)
    )
    assert draft_positions.shape == (1, 50) and draft_mask.shape == (1, 1, 50, 23 + 50)
    assert ((draft_mask == 0).sum(-1) == draft_positions + 1).all()

    drafter.prefill(prefix)
    draft_tokens, tree_structure, tree_mask = drafter.generate_draft_tree(None, state_manager)
    assert [array.shape for array in (draft_tokens, tree_structure, tree_mask)] == [(5, 110), (5, 110), (5, 110, 110)]
    assert drafter.forward.shapes[-1] == (1, 50) and drafter.draft_kv_cache.current_length == 23
    assert all(isinstance(array, jax.Array) for array in (draft_tokens, tree_structure, tree_mask))


def test_section_5_accepted_3_1_and_2_tokens_are_aligned():
    manager = AlignmentManager(3, DEVICE)
    manager.cache_lengths = jnp.array([100, 98, 99])
    state = manager.align_for_decode(jnp.array([3, 1, 2]), [jnp.array([1, 2, 3]), jnp.array([1]), jnp.array([1, 2])])
    input_ids, padding_mask, position_ids = state
    assert input_ids.tolist() == [[1, 2, 3], [0, 0, 1], [0, 1, 2]]
    assert padding_mask.astype(int).tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert [row[mask].tolist() for row, mask in zip(position_ids, padding_mask, strict=True)] == [
        [100, 101, 102], [98], [99, 100],
    ]  # fmt: skip
    assert state.padding_lengths.tolist() == [0, 2, 1] and state.input_lengths.tolist() == [3, 1, 2]
    assert state.position_offsets.tolist() == [0, 2, 1]


def test_section_5_a_prefill_of_200_beside_decodes_of_2_ends_at_350():
    manager = AlignmentManager(2, DEVICE, prefix_len=50)
    manager.cache_lengths = [150, 150]
    prompt = jnp.arange(200)
    state = manager.align_continuous_decode([prompt], [jnp.array([1, 2]), jnp.array([3, 4])])
    assert state.cache_length == 350
    assert state.valid_lengths.tolist() == manager.cache_lengths.tolist() == [152, 152, 250]
    assert state.input_lengths.tolist() == [2, 2, 200] and state.is_prefill.tolist() == [False, False, True]
    assert state.padding_mask.shape == state.position_ids.shape == (3, 200)
    assert state.position_ids[0, -2:].tolist() == [150, 151] and state.position_ids[2].tolist() == [*range(50, 250)]
    assert state.query_mask[2, 0].nonzero()[0].tolist() == [*range(50), 150]  # prefix, then a hole of 100


@pytest.mark.parametrize("use_bim_mode", [True, False])
def test_section_6_one_interface_serves_both_modes(use_bim_mode):
    manager = BranchStateManager(64, DEVICE, use_bim_mode, num_branches=2)
    manager.init_prefix(10)
    starts = [manager.add_branch(branch, tokens) for branch, tokens in enumerate(([5, 6, 7], [8]))]
    assert starts == ([10, 13] if use_bim_mode else [10, 10])
    input_ids, attention_mask, position_ids = manager.prepare_decode_inputs(
        jnp.array([1, 2]), [jnp.array([1]), jnp.array([2, 3])]
    )
    assert input_ids.tolist() == ([[1, 2, 3]] if use_bim_mode else [[0, 1], [2, 3]])
    assert position_ids.tolist() == ([[13, 11, 12]] if use_bim_mode else [[0, 13], [11, 12]])
    assert attention_mask.shape == ((1, 1, 3, 17) if use_bim_mode else (2, 2))
    assert manager.branch_outputs == {0: [5, 6, 7, 1], 1: [8, 2, 3]}
    assert manager.branch_cache_lengths == {0: 14, 1: 13}
