"""The rows of a launch of seated sequences of which some share a lane."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.branching.bim import TRUNK
from jaxinfer.branching.branch_state import Lane
from jaxinfer.programs.batch_layout import PackedBatch
from jaxinfer.scheduling.request import Request


def lanes_of(
    requests: Sequence[Request], max_pages: int, max_branches: int | None = None
) -> list[tuple[Lane, list[int]]]:
    """Return the lanes in which a launch reads these requests, each with the indices of its requests in order.

    Args:
        max_pages, max_branches: limits of a lane; None: any number.
    """
    lanes: list[tuple[Lane, list[int]]] = []
    of_groups: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        if request.group is not None and request.shares_lane:
            of_groups.setdefault(request.group.request_id, []).append(index)
        else:
            pages = request.pages
            lanes.append((Lane(pages, [TRUNK] * len(pages), len(pages), (TRUNK,), {TRUNK: 0}), [index]))
    for indices in of_groups.values():
        group = requests[indices[0]].group
        assert group is not None
        at = {requests[index].branch: index for index in indices}
        for lane in group.branches.lanes(at, max_pages=max_pages, max_branches=max_branches):
            lanes.append((lane, [at[branch] for branch in lane.branches]))
    return lanes


def fill_lanes(
    packed: PackedBatch,
    lanes: Sequence[tuple[Lane, list[int]]],
    requests: Sequence[Request],
    first_pages: np.ndarray,
    page_size: int,
) -> np.ndarray:
    """Fill in rows, and the places in them of each sequence's pages, from its `first_pages`th page on.

    Returns:
        int32 [requests]: the place of each request among the launch's sequences.
    """
    places = np.zeros(len(requests), np.int32)
    window = packed.shape.lane_pages
    sequence = 0
    for row, (lane, indices) in enumerate(lanes):
        count = len(lane.pages)
        packed["page_table"][row, :count] = lane.pages
        packed["page_branch"][row, :count] = lane.owners
        packed["kv_len"][row] = packed["tail_start"][row] = count * page_size
        packed["trunk_len"][row] = lane.trunk_pages * page_size
        packed["query_start_loc"][row + 1 :] = sequence + len(indices)
        for branch, index in zip(lane.branches, indices, strict=True):
            request, first = requests[index], int(first_pages[index])
            # Its own pages follow each other in the lane, from `first_own` on.
            trunk = request.trunk if request.shares_lane else None
            before = lane.first_own[branch] - (0 if trunk is None else trunk.num_tokens // page_size)
            found = np.arange(first, min(first + window, len(request.pages))) + before
            packed["lane_page"][sequence, : len(found)] = found
            packed["branch"][sequence] = branch
            packed["row"][sequence] = row
            places[index] = sequence
            sequence += 1
    packed["first_page"][places] = first_pages
    return places
