"""The case table of paged attention: one name for each situation that every backend must get right."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from tests.attention.lanes import block_lane, branched_lane, plain_lane, with_tail
from tests.attention.scenes import Heads, Scene, make_scene

CASES: dict[str, Callable[[], Scene]] = {}


def case(build: Callable[[], Scene]) -> Callable[[], Scene]:
    """Enter a scene into the table under its function's name."""
    CASES[build.__name__] = build
    return build


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@case
def one_decode() -> Scene:
    return make_scene([plain_lane(16, 20, 1)])


@case
def the_first_token_of_a_sequence() -> Scene:
    return make_scene([plain_lane(16, 0, 1)], [plain_lane(16, 0, 2)])


@case
def decodes_of_very_different_lengths() -> Scene:
    return make_scene([plain_lane(16, n, 1) for n in (300, 0, 17, 140)])


@case
def decodes_beside_padding_rows() -> Scene:
    return make_scene([plain_lane(4, n, 1) for n in (9, 3)], decode_rows=4)


@case
def more_decode_rows_than_one_tile_and_not_a_multiple_of_it() -> Scene:
    return make_scene([plain_lane(4, 3 * n, 1) for n in range(19)])


@case
def tiles_of_padding_rows_alone() -> Scene:
    return make_scene([plain_lane(4, 5 * n, 1) for n in range(3)], decode_rows=32)


@case
def one_prefill() -> Scene:
    return make_scene([], [plain_lane(16, 0, 37)])


@case
def a_prefill_longer_than_one_block() -> Scene:
    return make_scene([], [plain_lane(16, 0, 150)])


@case
def a_prefill_of_exactly_one_block_and_one_of_a_token_more() -> Scene:
    return make_scene([], [plain_lane(16, 0, 64), plain_lane(16, 0, 65)])


@case
def a_chunk_that_continues_a_long_prompt() -> Scene:
    return make_scene([], [plain_lane(16, 250, 70)])


@case
def several_prefills_whose_blocks_overhang_into_the_next_row() -> Scene:
    lanes = [plain_lane(4, context, new) for context, new in ((0, 3), (5, 71), (0, 10), (130, 33))]
    return make_scene([], lanes)


@case
def prefill_rows_of_length_zero_and_padding_tokens() -> Scene:
    return make_scene([], [plain_lane(4, 0, 5), plain_lane(4, 6, 9)], prefill_rows=6, prefill_tokens=64)


@case
def a_group_of_prefill_rows_that_is_empty() -> Scene:
    return make_scene([plain_lane(4, 7, 1)], [], prefill_rows=2, prefill_tokens=16)


@case
def a_group_of_decode_rows_that_is_empty() -> Scene:
    return make_scene([], [plain_lane(4, 7, 6)], decode_rows=8)


@case
def decodes_beside_prefills_with_padding_in_both_groups() -> Scene:
    decodes = [plain_lane(16, n, 1) for n in (200, 31, 64)]
    prefills = [plain_lane(16, 0, 40), plain_lane(16, 100, 30)]
    return make_scene(decodes, prefills, decode_rows=8, prefill_rows=4, prefill_tokens=80)


@case
def more_decode_rows_than_are_taken_at_once_of_very_different_lengths() -> Scene:
    lengths = [2300, *rng().integers(0, 150, 20).tolist(), 700, 128, 127, *rng().integers(0, 400, 10).tolist(), 2100]
    return make_scene([plain_lane(16, n, 1) for n in lengths], decode_rows=48)


@case
def empty_rows_between_decode_rows() -> Scene:
    lengths = [5, *[None] * 20, 300, None, 40, *[None] * 17, 129, None]
    return make_scene([plain_lane(16, 0, 0) if n is None else plain_lane(16, n, 1) for n in lengths], decode_rows=64)


def _at_borders(page_size: int) -> Scene:
    """Lanes that end at, just before and just after the borders of pages and of the backend's chunks."""
    borders = sorted({page_size, 2 * page_size, 128, 256})
    lengths = [border + delta for border in borders for delta in (-1, 0, 1) if border + delta > 0]
    decodes = [plain_lane(page_size, length - 1, 1) for length in lengths]
    return make_scene(decodes, [plain_lane(page_size, 127, 2), plain_lane(page_size, page_size - 1, 3)])


for _page_size in (1, 4, 16, 128, 256):
    CASES[f"lengths_at_page_and_chunk_borders_with_pages_of_{_page_size}"] = lambda size=_page_size: _at_borders(size)


@case
def branches_of_a_lane_stacked_in_one_row() -> Scene:
    lanes = [
        branched_lane(rng(), 4, trunk, lengths)
        for trunk, lengths in ((8, (3, 5, 1)), (10, (6, 2, 9)), (0, (4, 4)), (33, (1,)))
    ]
    return make_scene(lanes, decode_rows=6, decode_width=3)


@case
def branches_on_large_pages_and_a_trunk_longer_than_a_chunk() -> Scene:
    return make_scene([branched_lane(rng(), 64, 200, (70, 3, 64, 65, 1))], decode_width=5)


@case
def several_new_tokens_of_every_branch() -> Scene:
    lane = branched_lane(rng(), 4, 6, (9, 8, 12), new=4)
    return make_scene([lane], [lane], decode_width=12)


@case
def a_branch_that_prefills_while_others_wait() -> Scene:
    lanes = [branched_lane(rng(), 16, 21, (5, 90, 8), new=80, only=1), branched_lane(rng(), 16, 3, (7, 9), new=5)]
    return make_scene([branched_lane(rng(), 16, 18, (2, 4))], lanes, decode_width=2)


@case
def a_chain_of_draft_tokens() -> Scene:
    lanes = [with_tail(rng(), plain_lane(4, n, 1), 6, chain=True) for n in (0, 3, 50, 130)]
    return make_scene(lanes, decode_width=6, num_words=1)


@case
def draft_trees_of_one_word() -> Scene:
    lanes = [with_tail(rng(), plain_lane(16, n, 1), nodes) for n, nodes in ((30, 32), (5, 20), (127, 1))]
    return make_scene(lanes, decode_rows=4, decode_width=32, num_words=1)


@case
def draft_trees_of_two_words() -> Scene:
    return make_scene([with_tail(rng(), plain_lane(16, n, 1), 50) for n in (40, 9)], decode_width=64, num_words=2)


@case
def draft_trees_of_ninety_six_nodes() -> Scene:
    return make_scene([with_tail(rng(), plain_lane(16, n, 1), 96) for n in (60, 1)], decode_width=96, num_words=3)


@case
def draft_trees_of_several_branches_at_once() -> Scene:
    lanes = [with_tail(rng(), branched_lane(rng(), 4, t, lengths), 40) for t, lengths in ((9, (4, 7)), (16, (1, 2, 3)))]
    return make_scene(lanes, decode_width=40, num_words=2)


@case
def tails_in_prefill_rows_beside_plain_rows() -> Scene:
    prefills = [plain_lane(4, 0, 20), with_tail(rng(), plain_lane(4, 70, 1), 70), plain_lane(4, 9, 3)]
    return make_scene([plain_lane(4, 12, 1)], prefills, num_words=3, prefill_tokens=100)


@case
def diffusion_blocks_that_see_both_ways() -> Scene:
    return make_scene([block_lane(16, 33, 8)], [block_lane(16, 20, 32), block_lane(16, 0, 70)], decode_width=8)


@case
def windows_of_decodes_that_begin_at_and_near_borders() -> Scene:
    return make_scene([plain_lane(4, n, 1) for n in (0, 1, 15, 16, 17, 140, 142, 143, 300)], window=16)


@case
def a_window_of_one_token() -> Scene:
    return make_scene([plain_lane(16, n, 1) for n in (0, 20, 127, 128)], [plain_lane(16, 120, 20)], window=1)


@case
def windows_of_a_long_chunk_and_of_a_prompt_that_is_shorter() -> Scene:
    return make_scene([], [plain_lane(16, 250, 150), plain_lane(16, 0, 9), plain_lane(16, 127, 2)], window=40)


@case
def a_window_that_is_longer_than_every_lane() -> Scene:
    return make_scene([plain_lane(16, n, 1) for n in (5, 200)], [plain_lane(16, 30, 20)], window=500)


@case
def windows_of_branches_that_begin_in_the_trunk_and_after_it() -> Scene:
    lanes = [
        branched_lane(rng(), 4, trunk, lengths) for trunk, lengths in ((8, (3, 5, 1)), (10, (6, 2, 9)), (200, (4, 4)))
    ]
    return make_scene(lanes, [branched_lane(rng(), 4, 6, (9, 40), new=30, only=1)], decode_width=3, window=6)


@case
def windows_that_end_inside_draft_trees() -> Scene:
    lanes = [with_tail(rng(), plain_lane(16, n, 1), nodes, chain=chain) for n, nodes, chain in (
        (30, 32, False), (5, 6, True), (300, 9, True),
    )]  # fmt: skip
    return make_scene(lanes, decode_rows=4, decode_width=32, num_words=1, window=3)


@case
def windows_of_trees_of_several_branches() -> Scene:
    lanes = [with_tail(rng(), branched_lane(rng(), 4, t, lengths), 40) for t, lengths in ((9, (4, 7)), (16, (1, 2, 3)))]
    return make_scene(lanes, decode_width=40, num_words=2, window=5)


def _mixed(heads: Heads, window: int | None = None) -> Scene:
    """Every kind of row in one step."""
    decodes = [
        plain_lane(16, 141, 1),
        branched_lane(rng(), 16, 20, (3, 18)),
        with_tail(rng(), plain_lane(16, 37, 1), 4),
    ]
    prefills = [plain_lane(16, 12, 66), block_lane(16, 5, 8), branched_lane(rng(), 16, 7, (20, 4), new=9, only=0)]
    sizes = {"decode_rows": 4, "prefill_rows": 4, "prefill_tokens": 96}
    return make_scene(decodes, prefills, decode_width=4, num_words=1, heads=heads, window=window, **sizes)


HEADS = {
    "one_query_head_per_kv_head": Heads(3, 3, 8),
    "four_query_heads_per_kv_head": Heads(8, 2, 32),
    "one_kv_head_in_bfloat16": Heads(4, 1, 64, jnp.bfloat16),
    "two_query_heads_per_kv_head_in_float16": Heads(4, 2, 16, jnp.float16),
    "sinks": Heads(4, 2, 8, sinks=(0.5, -3.0, 4.0, 0.0)),
    "capped_scores": Heads(4, 2, 8, cap=0.7),
    "sinks_and_capped_scores": Heads(4, 2, 8, cap=1.5, sinks=(2.0, 1.0, -1.0, 0.3)),
}
for _name, _heads in HEADS.items():
    CASES[f"every_kind_of_row_at_once_with_{_name}"] = lambda heads=_heads: _mixed(heads)
    CASES[f"every_kind_of_row_in_a_window_with_{_name}"] = lambda heads=_heads: _mixed(heads, window=20)
