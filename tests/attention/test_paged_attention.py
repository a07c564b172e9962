"""Every attention backend over the same case table: equal to dense attention, blind to garbage and to neighbours."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.backend import ATTENTION_BACKENDS, select_backend
from kernels_pallas.branch_attention.reference import paged_attention, plan_paged_attention
from tests.attention.cases import CASES
from tests.attention.lanes import branched_lane, plain_lane, with_tail
from tests.attention.scenes import make_scene
from tests.tolerances import tolerance

BACKENDS = {"xla": (plan_paged_attention, paged_attention)}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.fixture(params=BACKENDS, scope="module")
def attention(request):
    return BACKENDS[request.param]


@pytest.mark.parametrize("name", CASES)
def test_paged_attention_equals_dense_attention_over_what_each_token_sees(attention, name):
    scene = CASES[name]()
    out = scene.run(*attention)
    name = scene.q.dtype.name
    error = tolerance(TOLERANCE[name]) if name == "float32" else TOLERANCE[name]
    np.testing.assert_allclose(out, scene.expected, rtol=error, atol=error)


@pytest.mark.parametrize("name", ["decodes_beside_prefills_with_padding_in_both_groups", "draft_trees_of_one_word"])
def test_padding_tokens_give_zeros(attention, name):
    scene = CASES[name]()
    padding = scene.run(*attention)[scene.row_of < 0]
    assert len(padding) and np.array_equal(padding, np.zeros_like(padding))


def mixed_rows():
    rng = np.random.default_rng(3)
    decodes = [plain_lane(16, n, 1) for n in (3, 150)]
    decodes += [branched_lane(rng, 16, 21, (4, 9)), with_tail(rng, plain_lane(16, 40, 1), 3)]
    prefills = [plain_lane(16, 0, 30), plain_lane(16, 140, 70), plain_lane(16, 7, 9)]
    return {"decode": decodes, "prefill": prefills, "decode_width": 3, "num_words": 1, "prefill_tokens": 128}


@pytest.mark.parametrize("row", range(7))
def test_a_row_does_not_change_by_a_bit_when_all_its_neighbours_change(attention, row):
    neighbours = [other for other in range(7) if other != row]
    before, after = make_scene(**mixed_rows()), make_scene(**mixed_rows(), redrawn_rows=neighbours)
    own = before.row_of == row
    one, other = before.run(*attention), after.run(*attention)
    assert np.array_equal(one[own], other[own])
    assert not np.array_equal(one[~own], other[~own])


def with_nan(scene, where):
    """The scene with NaN in the slots of the pool for which bool [slots] says so."""
    size = scene.k_pages.shape[1]
    mask = where.reshape(-1, size, 1, 1)
    k, v = (jnp.where(mask, jnp.nan, pages) for pages in (scene.k_pages, scene.v_pages))
    return replace(scene, k_pages=k, v_pages=v)


def slots_of(scene) -> np.ndarray:
    return np.zeros(scene.k_pages.shape[0] * scene.k_pages.shape[1], bool)


@pytest.mark.parametrize("row", range(7))
def test_nan_in_one_row_is_nothing_to_its_neighbours(attention, row):
    scene = make_scene(**mixed_rows())
    table = np.asarray(scene.metadata.page_table)
    own, where = scene.row_of == row, slots_of(scene).reshape(len(scene.k_pages), -1)
    where[np.setdiff1d(table[row], np.delete(table, row, axis=0))] = True
    one, other = scene.run(*attention), with_nan(scene, where).run(*attention)
    assert np.array_equal(one[~own], other[~own]) and not np.isnan(one).any()
    assert np.isnan(other[own]).all()


@pytest.mark.parametrize("row", [2, 3, 4, 5, 6])
def test_nan_of_a_token_is_nothing_to_tokens_of_its_row_that_do_not_see_it(attention, row):
    scene = make_scene(**mixed_rows())
    last = np.flatnonzero(scene.row_of == row)[-1]
    where = slots_of(scene)
    where[np.asarray(scene.metadata.slot_mapping)[last]] = True
    one, other = scene.run(*attention), with_nan(scene, where).run(*attention)
    assert np.isnan(other[last]).all()
    assert np.array_equal(np.delete(one, last, axis=0), np.delete(other, last, axis=0))


def test_chunks_before_every_window_are_not_read(attention):
    plan, attend = attention
    scene = make_scene([plain_lane(16, 1000, 1), plain_lane(16, 500, 1)], [plain_lane(16, 700, 20)], window=100)
    where = slots_of(scene).reshape(len(scene.k_pages), -1)
    table = np.asarray(scene.metadata.page_table)
    for row, begin in enumerate((901, 401, 601)):
        where[table[row, : begin // 128 * 8]] = True
    one, other = scene.run(plan, attend), with_nan(scene, where).run(plan, attend)
    assert np.array_equal(one, other)
    if plan is plan_paged_attention:
        found = [np.asarray(tiles.chunks).tolist() for tiles in plan(scene.metadata, scene.sizes).tiles]
        assert found == [[1, 1], [2, 0, 0]]


def test_a_row_does_not_change_by_a_bit_beside_neighbours_of_other_lengths(attention):
    def run(*neighbours: int) -> np.ndarray:
        lanes = [plain_lane(16, length, 1) for length in (33, *neighbours)]
        return make_scene(lanes, [plain_lane(16, 0, 500)]).run(*attention)[0]

    # As many pages in all, so that the shapes are the same, and four chunks instead of two to walk over.
    assert np.array_equal(run(225, 230), run(5, 450))


def test_where_the_pages_lie_in_the_pool_does_not_matter(attention):
    rng = np.random.default_rng(0)
    scene = make_scene([branched_lane(rng, 4, 10, (5, 6, 7))], [plain_lane(4, 6, 20)], decode_width=3)
    moved_to = rng.permutation(scene.k_pages.shape[0])
    k, v = (jnp.zeros_like(pool).at[moved_to].set(pool) for pool in (scene.k_pages, scene.v_pages))
    table = jnp.asarray(moved_to, jnp.int32)[scene.metadata.page_table]
    moved = replace(scene, k_pages=k, v_pages=v, metadata=replace(scene.metadata, page_table=table))
    assert np.array_equal(scene.run(*attention), moved.run(*attention))


def test_auto_selects_a_backend_that_is_in_the_table():
    backend = select_backend("auto")
    assert (backend.plan, backend.attention) in BACKENDS.values()


def test_every_backend_that_can_be_asked_for_is_tested():
    # The kernel of "pallas" has a table of its own, in tests/kernels: it takes 16-bit precision and few head sizes.
    assert {"auto", "pallas", *BACKENDS} == set(ATTENTION_BACKENDS)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="attention_backend must be one of auto, xla, pallas, got 'cuda'"):
        select_backend("cuda")
