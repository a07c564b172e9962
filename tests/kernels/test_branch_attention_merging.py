"""Splits of the branch attention kernel are merged by their weights, each token with its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.branch_attention import merging
from kernels_pallas.branch_attention.blocks import block_of_tokens, decode_blocks
from kernels_pallas.branch_attention.tuning import QUERY_ROWS, Tuning
from tests.attention.lanes import plain_lane
from tests.attention.scenes import make_scene

SPLITS, TOKENS, HEADS, DIM = 4, 3, 2, 8
NOTHING = -1e30  # how the kernel marks a split in which a query saw nothing


def merged(log_weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The merge of random parts under jit, and their weighted mean in float64."""
    parts = np.random.default_rng(0).standard_normal((SPLITS, TOKENS, HEADS, DIM)).astype(np.float32)
    weights = np.exp2(log_weight - log_weight.max(axis=0))[..., None]
    mean = (weights * parts).sum(axis=0) / weights.sum(axis=0)
    return np.asarray(jax.jit(merging.merge)(jnp.asarray(parts), jnp.asarray(log_weight, jnp.float32))), mean


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_parts_count_by_their_weights_however_far_these_lie_apart(spread):
    log_weight = np.random.default_rng(1).uniform(-spread, spread, (SPLITS, TOKENS, HEADS)).astype(np.float32)
    got, mean = merged(log_weight.astype(np.float64))
    np.testing.assert_allclose(got, mean, rtol=2e-6, atol=2e-6)


def test_a_split_in_which_a_query_saw_nothing_does_not_count():
    log_weight = np.zeros((SPLITS, TOKENS, HEADS))
    log_weight[[0, 2]] = NOTHING
    got, mean = merged(log_weight)
    np.testing.assert_allclose(got, mean, rtol=2e-6, atol=2e-6)


def test_a_query_that_saw_nothing_in_any_split_gives_the_zeros_that_the_parts_hold():
    log_weight = jnp.full((SPLITS, TOKENS, HEADS), NOTHING)
    assert not np.asarray(jax.jit(merging.merge)(jnp.zeros((SPLITS, TOKENS, HEADS, DIM)), log_weight)).any()


@pytest.mark.parametrize("tuning", [Tuning(tokens=3), Tuning(consumers=2, tokens=4), Tuning(tokens=16)])
@pytest.mark.parametrize("width", [1, 3, 10])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_each_token_of_a_decode_row_finds_the_weights_of_its_block(group, width, tuning):
    step = make_scene([plain_lane(16, 5, 1)] * TOKENS, decode_width=width).metadata
    blocks = decode_blocks(step, tuning.tokens_per_block(group))
    shape = (SPLITS, blocks.row.shape[0], HEADS, tuning.consumers, QUERY_ROWS)
    log_weight = jnp.asarray(np.random.default_rng(2).standard_normal(shape))
    block, place = block_of_tokens(blocks, jnp.arange(TOKENS * width))
    by_gather = merging.of_tokens(log_weight, block, place, group, tuning)
    by_place = merging.of_decode_tokens(log_weight, TOKENS, width, group, tuning)
    assert by_gather.shape == (SPLITS, TOKENS * width, HEADS * group)
    assert np.array_equal(by_gather, by_place)
