"""The plan of the branch attention kernel says of every query and slot what the visibility rule says."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.branch_attention.blocks import (
    HEADER,
    IDLE,
    PAGE,
    QUERY,
    block_of_tokens,
    decode_blocks,
    plan_blocks,
    prefill_blocks,
)
from kernels_pallas.branch_attention.tuning import Tuning
from kernels_pallas.visibility import visible
from tests.attention.lanes import block_lane, branched_lane, plain_lane, with_tail
from tests.attention.scenes import Heads, make_scene

GROUP = 3
HEADS = Heads(GROUP, 1, 2)


def rule(step, page_size: int) -> np.ndarray:
    """bool [T, lane]: what each token sees."""
    lane = np.arange(step.page_table.shape[1] * page_size)
    row = step.row
    seen = visible(
        lane[None],
        limit=step.limit[:, None],
        branch=step.branch[:, None],
        tail_bits=step.tail_bits[:, None],
        trunk_len=step.trunk_len[row][:, None],
        tail_start=step.tail_start[row][:, None],
        index_branch=np.repeat(step.page_branch, page_size, axis=1)[row],
        first=step.first[:, None] if len(step.first) else None,
    )
    return np.asarray(seen)


def told(step, plan, page_size: int, tuning: Tuning) -> tuple[np.ndarray, np.ndarray]:
    """bool [T, lane] each: what each token sees, and what its whole block keeps, as the kernel reads the plan."""
    plan = jax.tree.map(np.asarray, plan)
    lane_len = step.page_table.shape[1] * page_size
    seen, kept = (np.zeros((step.limit.shape[0], lane_len), bool) for _ in range(2))
    pages_per_tile = tuning.tile // page_size
    for block, header in enumerate(plan.header):
        values = {"first": 0} | dict(zip(HEADER, header.tolist(), strict=False))
        for entry in range(values["tiles"] * pages_per_tile):
            page = dict(zip(PAGE, plan.pages[block, :, entry].tolist(), strict=True))
            tile = entry // pages_per_tile
            if page["lane_page"] * page_size >= lane_len:
                assert tile >= values["full_tiles"], "what fills up a tile must be masked"
                continue
            row = int(step.row[values["first_token"]])
            assert step.page_table[row, page["lane_page"]] == page["page"]
            slots = page["lane_page"] * page_size + np.arange(page_size)
            bit = slots - values["tail_page"] * page_size

            def bits(words, bit=bit):
                word = np.clip(bit // 32, 0, len(words) - 1)
                return (words[word] >> (bit % 32)) & 1 == 1

            in_tail = (slots >= values["tail_start"]) & (tile >= values["context_tiles"])
            keeps = (slots >= values["first"]) & (slots < page["context_end"])
            if plan.tail_bits is not None:
                keeps = keeps | (in_tail & bits(plan.block_tail_bits[block]))
            for index in range(values["num_tokens"]):
                consumer, place = divmod(index, tuning.tokens_per_consumer(GROUP))
                stacked = plan.queries[block, consumer, :, place * GROUP : (place + 1) * GROUP]
                assert (stacked == stacked[:, :1]).all()
                query = {"first": 0} | dict(zip(QUERY, stacked[:, 0].tolist(), strict=False))
                own = query["branch"] == page["owner"]
                sees = (slots >= query["first"]) & (slots < query["own_bound" if own else "trunk_bound"])
                if plan.tail_bits is not None:
                    sees = sees | (in_tail & bits(plan.tail_bits[block, consumer, :, place * GROUP]))
                token = values["first_token"] + index
                seen[token, slots] = query["branch"] != IDLE if tile < values["full_tiles"] else sees
                kept[token, slots] = keeps
    return seen, kept


# One shape per group of examples: a plan compiles once for it.
ROWS, WIDTH, PREFILL_TOKENS, PAGES = 3, 96, 224, 32


@st.composite
def steps(draw, page_size: int, words: int, kinds=("plain", "block", "branched", "tree")):
    """A random step: decode rows with branches and trees, prefill rows, padding rows and tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def lane(new: int):
        kind = draw(st.sampled_from(kinds))
        context = draw(st.integers(0, 150))
        if kind == "plain":
            return plain_lane(page_size, context, new)
        if kind == "block":
            return block_lane(page_size, context, new)
        lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
        if kind == "branched" or not words:
            return branched_lane(rng, page_size, context, lengths)
        root = branched_lane(rng, page_size, context, lengths) if draw(st.booleans()) else plain_lane(page_size, 9, 1)
        return with_tail(rng, root, draw(st.integers(1, 32 * words)))

    window = draw(st.none() | st.integers(1, 100))
    decodes = [lane(draw(st.integers(1, 3))) for _ in range(draw(st.integers(0, ROWS)))]
    prefills = [lane(draw(st.integers(1, 90))) for _ in range(draw(st.integers(not decodes, 2)))]
    scene = make_scene(
        decodes, prefills, decode_rows=ROWS, decode_width=WIDTH, num_words=words, heads=HEADS, prefill_rows=ROWS,
        prefill_tokens=PREFILL_TOKENS, window=window,
    )  # fmt: skip
    step = jax.tree.map(np.asarray, scene.metadata)
    more = [(0, 0), (0, PAGES - step.page_table.shape[1])]
    return replace(step, page_table=np.pad(step.page_table, more), page_branch=np.pad(step.page_branch, more))


@partial(jax.jit, static_argnames=("page_size", "tuning"))
def plans(step, page_size: int, tuning: Tuning):
    """The blocks and plans of the two groups."""
    cuts = [cut(step, tuning.tokens_per_block(GROUP)) for cut in (decode_blocks, prefill_blocks)]
    return [(cut, plan_blocks(step, cut, page_size=page_size, group=GROUP, tuning=tuning)) for cut in cuts]


@pytest.mark.parametrize(
    ("page_size", "words", "tuning"),
    [
        (16, 0, Tuning(tokens=5)),
        (16, 3, Tuning(tokens=16, tile=128)),
        (32, 1, Tuning(consumers=2, tokens=21)),
        (64, 2, Tuning(consumers=2, tokens=8, tile=128)),
        (64, 0, Tuning(tokens=21, tile=128)),
        (64, 3, Tuning()),
    ],
)
@settings(max_examples=24)
@given(data=st.data())
def test_a_plan_lists_for_every_block_exactly_what_its_queries_see(page_size, words, tuning, data):
    step = data.draw(steps(page_size, words))
    seen = kept = np.zeros((step.limit.shape[0], PAGES * page_size), bool)
    for decode, (blocks, plan) in zip((True, False), plans(step, page_size, tuning), strict=True):
        ours = told(step, plan, page_size, tuning)
        seen, kept = seen | ours[0], kept | ours[1]
        assert covered_once(jax.tree.map(np.asarray, blocks), step, decode)
    expected = rule(step, page_size)
    assert np.array_equal(seen, expected)
    assert not (expected & ~kept).any()


@pytest.mark.parametrize(
    ("page_size", "tuning"), [(16, Tuning(tokens=5)), (64, Tuning(tokens=21, tile=128)), (16, Tuning(tile=128))]
)
@settings(max_examples=25)
@given(data=st.data())
def test_rows_without_branches_have_the_plan_that_sorting_their_pages_gives(page_size, tuning, data):
    step = data.draw(steps(page_size, 0, kinds=("plain", "block")))
    step = replace(step, page_branch=np.full_like(step.page_branch, -1))
    assert (step.branch == -1).all()
    sorted_, in_order = (
        jax.tree.map(np.asarray, plans(replace(step, is_branched=is_branched), page_size, tuning))
        for is_branched in (True, False)
    )
    for expected, found in zip(jax.tree.leaves(sorted_), jax.tree.leaves(in_order), strict=True):
        np.testing.assert_array_equal(found, expected)


def covered_once(blocks, step, decode: bool) -> bool:
    """Whether the blocks hold each of their tokens once, where `block_of_tokens` finds it."""
    border = step.decode_rows * step.decode_width
    tokens = np.arange(border) if decode else np.arange(border, step.limit.shape[0])
    held = [
        (first + place, block, place)
        for block, (first, count) in enumerate(zip(blocks.first_token, blocks.num_tokens, strict=True))
        for place in range(int(count))
    ]
    found = zip(tokens, *(np.asarray(x) for x in block_of_tokens(blocks, jnp.asarray(tokens))), strict=True)
    return [tuple(map(int, x)) for x in held] == [tuple(map(int, x)) for x in found]


@pytest.mark.parametrize("branch", [0, 1])
def test_pages_of_a_branch_without_a_query_in_the_block_are_not_listed(branch):
    lane = branched_lane(np.random.default_rng(0), 16, 32, (40, 40), new=3, only=branch)
    scene = make_scene([], [lane], heads=HEADS)
    step = scene.metadata
    tuning = Tuning()
    plan = plan_blocks(step, prefill_blocks(step, tuning.tokens_per_block(GROUP)), page_size=16, group=GROUP,
                       tuning=tuning)  # fmt: skip
    listed = np.asarray(plan.pages[0, PAGE.index("lane_page")])
    listed = set(listed[listed < step.page_table.shape[1]].tolist())
    owners = np.asarray(step.page_branch[0])[2 : len(lane.owners)]
    assert listed == {0, 1, *(2 + np.flatnonzero(owners == branch)).tolist()}


def test_pages_before_every_window_are_not_listed_and_those_inside_of_all_are_not_masked():
    tuning = Tuning(tokens=4)
    for is_branched in (False, True):
        step = replace(make_scene([plain_lane(16, 1000, 1)], heads=HEADS, window=200).metadata, is_branched=is_branched)
        plan = plan_blocks(step, decode_blocks(step, 4), page_size=16, group=GROUP, tuning=tuning)
        header = dict(zip(HEADER, np.asarray(plan.header[0]).tolist(), strict=True))
        # The window is [801, 1001): page 50 in part, pages 51 to 61 whole, page 62 in part, four to a tile.
        assert (header["first"], header["full_tiles"], header["tiles"]) == (801, 2, 4)
        assert np.asarray(plan.pages[0, PAGE.index("lane_page"), :13]).tolist() == [*range(51, 62), 50, 62]


def test_places_without_a_token_do_not_keep_a_decode_row_from_unmasked_tiles():
    tuning = Tuning(tokens=4)
    for width in (1, 4):
        step = make_scene([plain_lane(16, 200, 1)], heads=HEADS, decode_width=width).metadata
        plan = plan_blocks(step, decode_blocks(step, 4), page_size=16, group=GROUP, tuning=tuning)
        assert plan.header[0, HEADER.index("full_tiles")] == 3
        assert plan.header[0, HEADER.index("tiles")] == 4
