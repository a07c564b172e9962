"""Moving accepted tail slots: as numpy does it on random pools, in place, at a cost that no pool size changes."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.attention.backend import select_backend
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.programs.commit_tail import CommitTail, commit_tail, lane_slots, tail_moves
from jaxinfer.programs.program import KV, TARGET
from jaxinfer.programs.runner import Runner, initial_state
from tests.builders import model_config, random_model

pytestmark = pytest.mark.optimized

LAYERS, HEADS, DIM = 3, 2, 4
NUM_SLOTS = 48
ADDRESSED_BY_NOBODY = (-1, -7, -(2**31), NUM_SLOTS, NUM_SLOTS + 3, 2**31 - 1)
commit = jax.jit(commit_tail)

COMMIT = CommitTail()


def random_cache(page_size: int, *, num_slots: int = NUM_SLOTS, dtype: jnp.dtype = jnp.float32) -> KVPool:
    """Every number of every layer its own, keys and values alike."""
    shape = (num_slots // page_size, page_size, HEADS, DIM)
    rng = np.random.default_rng(page_size)
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2 * LAYERS)]
    return KVPool(k=tuple(arrays[::2]), v=tuple(arrays[1::2]))


def slots_of(pages: jax.Array) -> np.ndarray:
    """The bits of a pool, one row of integers a slot: NaNs compare like any other content."""
    host = np.array(pages)
    return host.view(f"u{host.itemsize}").reshape(-1, HEADS * DIM)


def assert_moved(before: KVPool, after: KVPool, source: np.ndarray, destination: np.ndarray) -> None:
    """All moves between slots of the pool have been made at once, in all layers, and nothing else has changed."""
    source, destination = np.ravel(source), np.ravel(destination)
    num_slots = before.num_pages * before.page_size
    moves = [i for i in range(source.size) if 0 <= source[i] < num_slots and 0 <= destination[i] < num_slots]
    for old, new in zip((*before.k, *before.v), (*after.k, *after.v), strict=True):
        expected = slots_of(old)
        expected[destination[moves]] = slots_of(old)[source[moves]]
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert np.array_equal(slots_of(new), expected)


@st.composite
def random_moves(draw, rows: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Moves that overlap in any way, some of them padding at either end or at both."""
    few = draw(st.integers(rows * nodes, NUM_SLOTS))  # of so many slots: the fewer, the more of them are both ends
    destination = np.array(draw(st.permutations(range(few)))[: rows * nodes])
    source = np.array(draw(st.lists(st.integers(0, few - 1), min_size=rows * nodes, max_size=rows * nodes)))
    for end in (source, destination):
        for i in draw(st.lists(st.integers(0, rows * nodes - 1), max_size=4)):
            end[i] = draw(st.sampled_from(ADDRESSED_BY_NOBODY))
    return source.reshape(rows, nodes).astype(np.int32), destination.reshape(rows, nodes).astype(np.int32)


@pytest.mark.parametrize(("page_size", "rows", "nodes"), [(1, 3, 5), (4, 1, 1), (4, 1, 6), (16, 4, 8)])
@settings(max_examples=40)
@given(st.data())
def test_any_moves_are_those_of_numpy_in_every_layer(page_size, rows, nodes, data):
    source, destination = data.draw(random_moves(rows, nodes))
    before = random_cache(page_size)
    assert_moved(before, commit(before, source, destination), source, destination)


def test_a_chain_of_moves_takes_every_slot_as_it_was_before_all_of_them():
    # 5 goes where 1 was, 1 where 0 was, 0 where 5 was: in any order one after the other, one of them would be lost.
    source, destination = np.array([[5, 1], [0, -1]]), np.array([[1, 0], [5, -1]])
    before = random_cache(4)
    after = commit(before, source, destination)
    assert_moved(before, after, source, destination)
    assert np.array_equal(slots_of(after.k[0])[[1, 0, 5]], slots_of(before.k[0])[[5, 1, 0]])


def test_rows_that_accept_nothing_leave_the_pool_as_it_is():
    before = random_cache(4)
    nothing = np.full((3, 5), -1)
    assert_moved(before, commit(before, nothing, nothing), nothing, nothing)


def test_what_is_not_accepted_is_not_read():
    rng = np.random.default_rng(0)
    source, destination = (rng.permutation(NUM_SLOTS)[:6].reshape(2, 3) for _ in range(2))
    source[1, 2] = destination[1, 2] = -1
    accepted = np.isin(np.arange(NUM_SLOTS), source).reshape(-1, 4)[..., None, None]
    before = jax.tree.map(lambda pages: jnp.where(accepted, pages, jnp.nan), random_cache(4))
    after = commit(before, source, destination)
    assert_moved(before, after, source, destination)
    landed = destination[destination >= 0]
    for pages in (*after.k, *after.v):
        assert not np.isnan(np.array(pages).reshape(NUM_SLOTS, -1)[landed]).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_values_move_bit_for_bit(dtype):
    rng = np.random.default_rng(1)
    source, destination = (rng.permutation(NUM_SLOTS)[:6].reshape(2, 3) for _ in range(2))
    before = random_cache(4, dtype=dtype)
    assert_moved(before, commit(before, source, destination), source, destination)


@cache
def compiled(num_slots: int, moves: int) -> tuple[jax.stages.Compiled, int]:
    """`commit_tail` with a donated pool, compiled for this machine; and the pool's bytes."""
    pool = random_cache(4, num_slots=num_slots)
    ends = jax.ShapeDtypeStruct((1, moves), jnp.int32)
    return jax.jit(commit_tail, donate_argnums=0).lower(pool, ends, ends).compile(), pool.nbytes


@pytest.mark.parametrize("moves", [1, 2, 16])
def test_a_donated_pool_is_updated_in_place_and_no_size_follows_its_size(moves):
    small, _ = compiled(64, moves)
    large, nbytes = compiled(64 * 1024, moves)
    memory, of_small = large.memory_analysis(), small.memory_analysis()
    assert memory is not None and of_small is not None
    assert memory.alias_size_in_bytes == nbytes
    assert memory.temp_size_in_bytes == of_small.temp_size_in_bytes < nbytes / LAYERS / 100
    # A copy of the pool, as pages or as slots.
    assert not re.search(r"f32\[(16384,4|65536),2,4\]\S* copy\(", large.as_text() or "")


def test_it_is_the_same_memory_afterwards():
    pool = jax.tree.map(lambda pages: pages + 0, random_cache(4))
    addresses = [pages.unsafe_buffer_pointer() for pages in (*pool.k, *pool.v)]
    after = jax.jit(commit_tail, donate_argnums=0)(pool, np.array([[7, 3]]), np.array([[3, 4]]))
    assert [pages.unsafe_buffer_pointer() for pages in (*after.k, *after.v)] == addresses


@given(st.data())
@settings(max_examples=30)
def test_the_slots_of_a_path_follow_from_the_page_table(data):
    page_size, rows, nodes, pages = data.draw(st.sampled_from([(1, 2, 3, 9), (4, 3, 5, 4), (16, 1, 6, 2)]))
    table = np.array(data.draw(st.permutations(range(rows * pages)))).reshape(rows, pages)
    tail_start = np.array([data.draw(st.integers(0, pages * page_size - nodes)) for _ in range(rows)])
    path = np.full((rows, nodes), -1)
    expected = np.full((2, rows, nodes), -1)
    for row in range(rows):
        offsets = sorted(data.draw(st.sets(st.integers(0, nodes - 1))))
        path[row, : len(offsets)] = offsets
        for depth, offset in enumerate(offsets):
            for end, index in enumerate((tail_start[row] + offset, tail_start[row] + depth)):
                expected[end, row, depth] = table[row, index // page_size] * page_size + index % page_size
    moves = jax.jit(tail_moves, static_argnames="page_size")(table, tail_start, path, page_size=page_size)
    assert np.array_equal(moves, expected)


def test_an_index_that_no_lane_has_gets_a_slot_that_no_pool_has():
    table = jnp.array([[3, 1], [2, 0]])
    index = jnp.array([[-1, 0, 7], [8, 4, -9]])
    assert lane_slots(table, index, page_size=4).tolist() == [[-1, 12, 7], [-1, 0, -1]]


@pytest.fixture(scope="module")
def runner() -> tuple[Runner, list[str]]:
    """A runner over a pool of pages of 4, and what it has compiled."""
    programs: list[str] = []
    model = random_model(model_config(num_kv_heads=HEADS, head_dim=DIM, num_layers=LAYERS, num_heads=2 * HEADS))
    pool = jax.tree.map(lambda pages: pages + 0, random_cache(4))
    return Runner(
        {TARGET: model},
        initial_state(pool, 1, model.config.vocab_size),
        select_backend("xla"),
        on_compile=programs.append,
    ), programs


def launch_commit(runner: Runner, moves: np.ndarray | jax.Array) -> None:
    runner.launch(COMMIT, moves.shape[1:], moves)


def test_the_runner_compiles_one_program_for_each_number_of_nodes(runner):
    runner, programs = runner
    rng = np.random.default_rng(2)
    for nodes in (2, 5, 2, 5, 5):
        moves = np.stack([rng.permutation(NUM_SLOTS)[: 3 * nodes].reshape(3, nodes) for _ in range(2)])
        moves[:, rng.integers(3)] = -1
        before = jax.tree.map(lambda pages: pages + 0, runner.state[KV])
        launch_commit(runner, moves.astype(np.int32) if nodes == 2 else jnp.asarray(moves, jnp.int32))
        assert_moved(before, runner.state[KV], *moves)
    assert programs == [f"commit of up to {nodes} draft tokens in 3 rows" for nodes in (2, 5)]


def test_the_runner_updates_its_pool_in_place(runner):
    runner, _ = runner
    addresses = [pages.unsafe_buffer_pointer() for pages in (*runner.state[KV].k, *runner.state[KV].v)]
    launch_commit(runner, np.full((2, 3, 2), -1, np.int32))
    assert [pages.unsafe_buffer_pointer() for pages in (*runner.state[KV].k, *runner.state[KV].v)] == addresses
