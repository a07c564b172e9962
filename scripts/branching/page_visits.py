"""Pages that the attention kernel loads for the branches of one trunk, read from the plan that it is launched with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from jaxinfer.branching.branch_state import BranchLanes
from jaxinfer.limits import BRANCH_MODES
from jaxinfer.programs.batch_layout import BatchShape, idle_batch, unpack
from kernels_pallas.branch_attention.blocks import decode_blocks, plan_blocks, prefill_blocks
from kernels_pallas.branch_attention.tuning import Tuning

PAGE_SIZE = 16
GROUP = 4  # query heads of a KV head, as in Qwen3-8B


@dataclass
class _Sequence:
    token_ids: list[int]
    pages: list[int]
    num_prompt_tokens: int = 0


def page_visits(branches: int, *, trunk_tokens: int, own_tokens: int) -> dict[str, int]:
    """Pages that one layer of a decode step loads for each KV head, by mode."""
    trunk_pages, own_pages = trunk_tokens // PAGE_SIZE, -(-own_tokens // PAGE_SIZE)
    trunk = _Sequence([0] * trunk_tokens, list(range(trunk_pages)))
    found: dict[str, int] = {}
    for mode in BRANCH_MODES:
        manager = BranchLanes(PAGE_SIZE, mode)
        manager.init_prefix(trunk)
        for branch in range(branches):
            first = trunk_pages + branch * own_pages
            own = list(range(first, first + own_pages))
            manager.add_branch(branch, _Sequence([0] * (trunk_tokens + own_tokens), [*trunk.pages, *own]))
        found[mode] = _pages_of(manager)
    return found


def _pages_of(manager: BranchLanes) -> int:
    inputs = manager.prepare_decode_inputs()
    lanes, count = inputs.lanes, len(inputs.token_ids)
    longest = max(len(lane.pages) for lane in lanes)
    alone = len(lanes) == count
    shape = BatchShape(count, 0, 0, longest) if alone else BatchShape.of_lanes(count, longest, 1)
    packed = idle_batch(shape, num_slots=2**30, num_seats=1)
    packed["limit"][:], packed["branch"][:], packed["row"][:] = inputs.limit, inputs.branch, inputs.row
    for row, lane in enumerate(lanes):
        pages = len(lane.pages)
        packed["page_table"][row, :pages] = lane.pages
        if shape.is_branched:
            packed["page_branch"][row, :pages] = lane.owners
        packed["kv_len"][row] = packed["tail_start"][row] = pages * PAGE_SIZE
        packed["trunk_len"][row] = lane.trunk_pages * PAGE_SIZE
        packed["query_start_loc"][row + 1 :] = np.count_nonzero(inputs.row <= row)
    step = unpack(jnp.asarray(packed.buffer), shape)
    tuning = Tuning()
    tokens = tuning.tokens_per_block(GROUP)
    blocks = decode_blocks(step, 1) if alone else prefill_blocks(step, tokens)
    plan = plan_blocks(step, blocks, page_size=PAGE_SIZE, group=GROUP, tuning=tuning)
    return int(np.count_nonzero(np.asarray(plan.pages)[:, 1] < longest))


def visits_table(numbers: Sequence[int] = (1, 2, 4, 8, 16), *, trunk_tokens: int = 8192, own_tokens: int = 64) -> Table:
    """Pages for each number of branches, by mode."""
    table = Table(
        title=f"Pages that a layer loads: a trunk of {trunk_tokens} tokens, and {own_tokens} of each branch",
        title_justify="left",
    )
    for heading in ("branches", *BRANCH_MODES):
        table.add_column(heading, justify="right")
    for count in numbers:
        found = page_visits(count, trunk_tokens=trunk_tokens, own_tokens=own_tokens)
        table.add_row(str(count), *(str(found[mode]) for mode in BRANCH_MODES))
    return table
