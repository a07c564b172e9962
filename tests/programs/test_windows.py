"""Windows count positions: in lanes and trees, where a lane index is no position, tokens see the same as alone."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.programs.batch_layout import BatchShape, StepBatch, idle_batch, unpack
from jaxinfer.programs.windows import within_window
from jaxinfer.speculative.tails import TailPages, num_words, positions_of_tails, with_tail

PAGE = 4


def batch_of(shape: BatchShape, **fields) -> StepBatch:
    batch = unpack(jnp.asarray(idle_batch(shape, num_slots=400, num_seats=8).buffer), shape)
    return replace(batch, **{name: jnp.asarray(value, jnp.int32) for name, value in fields.items()})


def two_branches(trunk_pages: int, lengths: tuple[int, int], lane_pages: int) -> tuple[StepBatch, list[list[int]]]:
    """A lane of a trunk and two branches, and for each branch the lane indices of its positions."""
    own = [-(-length // PAGE) for length in lengths]
    begins = [trunk_pages, trunk_pages + own[0]]
    shape = BatchShape.of_lanes(2, trunk_pages + sum(own), lane_pages)
    last = [trunk_pages * PAGE + length - 1 for length in lengths]
    # As the host does: the first page that a launch may write is that of the last but one known token.
    first_page = [(position + 1 - 2) // PAGE for position in last]
    lane_page = [
        [begin + first - trunk_pages + j for j in range(lane_pages)]
        for begin, first in zip(begins, first_page, strict=True)
    ]
    places = [
        [p if p < trunk_pages * PAGE else (begin - trunk_pages) * PAGE + p for p in range(position + 1)]
        for begin, position in zip(begins, last, strict=True)
    ]
    batch = batch_of(
        shape, positions=last, row=[0, 0], branch=[0, 1], limit=[indices[-1] for indices in places],
        trunk_len=[trunk_pages * PAGE, 0], first_page=first_page, lane_page=lane_page,
    )  # fmt: skip
    return batch, places


@pytest.mark.parametrize("window", [1, 3, 9, 14, 200])
@pytest.mark.parametrize("lengths", [(1, 2), (5, 6), (40, 13)])  # some longer than the window and the lane's pages
def test_branches_in_one_lane_see_the_last_positions_of_their_own(window, lengths):
    batch, places = two_branches(3, lengths, lane_pages=3)
    seen = within_window(batch, window, page_size=PAGE)
    owners = [-1] * 3 + [0] * -(-lengths[0] // PAGE) + [1] * -(-lengths[1] // PAGE)
    for branch, indices in enumerate(places):
        first, limit = int(seen.first[branch]), int(seen.limit[branch])
        visible = [i for i in range(len(owners) * PAGE) if first <= i <= limit and owners[i // PAGE] in (-1, branch)]
        assert visible == indices[max(0, len(indices) - window) :]


def test_a_window_of_slots_would_be_noticed():
    """The planted bug: the lane index of the token, less the window."""
    batch, places = two_branches(3, (40, 13), lane_pages=3)
    by_slot = np.maximum(np.asarray(batch.limit) - 13, 0)
    assert by_slot[1] != int(within_window(batch, 14, page_size=PAGE).first[1])
    assert places[1][-14] == int(within_window(batch, 14, page_size=PAGE).first[1])


@pytest.mark.parametrize("window", [1, 3, 6])
def test_nodes_of_a_tree_see_the_ancestors_within_the_window(window):
    """A chain of six levels with a sibling on each, in the tail of the only row."""
    depth = np.repeat(np.arange(1, 7), 2)
    parents = np.array([-1, -1, *(2 * (level - 1) for level in range(1, 6) for _ in range(2))])
    nodes, length = len(depth), 21
    tails = TailPages(first=50, each=3, page_size=PAGE, per_lane=1)
    one = batch_of(BatchShape(1, 0, 0, 8), row=[0], positions=[length - 1], kv_len=[length], query_start_loc=[0, 1])
    words = num_words(3 * PAGE)
    bits = np.zeros((1 + nodes, words), np.uint32)
    for node in range(nodes):
        above = node
        while above >= 0:
            bits[1 + node, above // 32] |= np.uint32(1 << above % 32)
            above = parents[above]
    positions = length - 1 + depth
    wide = replace(
        one, decode_width=1 + nodes, row=jnp.zeros(1 + nodes, jnp.int32),
        positions=jnp.asarray([length - 1, *positions], jnp.int32), query_start_loc=jnp.asarray([0, 1 + nodes]),
    )  # fmt: skip
    where = positions_of_tails(one, tails, jnp.asarray(positions[None], jnp.int32), words)
    wide = with_tail(wide, tails.of_rows(one), jnp.asarray(bits), page_size=PAGE, positions=where)
    found = np.asarray(within_window(wide, window, page_size=PAGE).tail_bits)
    for node in range(nodes):
        line, above = [], node
        while above >= 0:
            line.append(above)
            above = parents[above]
        kept = [ancestor for ancestor in line if depth[node] - depth[ancestor] < window]
        assert found[1 + node, 0] == sum(1 << ancestor for ancestor in kept)
    first = np.asarray(within_window(wide, window, page_size=PAGE).first)
    assert first.tolist() == [max(0, p - window + 1) for p in [length - 1, *positions]]
