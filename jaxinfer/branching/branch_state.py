"""State of the branches of one request: pages and their owners, positions, tips, and the lanes that launches read.

Every branch has a page table of its own: first the pages of the trunk, which all branches share, then its own. A
token's index in it is its position, so that the prefix cache and a drafter see the pages of an ordinary sequence. A
launch reads branches in lanes. "batching" has a lane for each table. "in_one_sequence" has the trunk's pages once,
followed by the own pages of many branches: attention depends on which branch owns a page, so nothing has to be moved
when a branch ends, and the next launch simply has a shorter lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxinfer.branching.bim import TRUNK, branch_index_map
from jaxinfer.limits import BRANCH_MODES


class BranchSequence(Protocol):
    """The sequence of a branch, or of the trunk, as its engine keeps it."""

    @property
    def token_ids(self) -> Sequence[int]: ...  # the trunk's tokens included

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def pages(self) -> Sequence[int]: ...  # those of the trunk included; empty while it does not run


@dataclass(frozen=True)
class Lane:
    """Pages that one row of a launch reads. Of its P pages, the first `trunk_pages` belong to all branches."""

    pages: list[int]
    owners: list[int]  # [P], the branch that owns the page; TRUNK: all of them
    trunk_pages: int
    branches: tuple[int, ...]
    first_own: Mapping[int, int]  # branch -> index in `pages` of the first page that is its own


@dataclass(frozen=True)
class DecodeInputs:
    """Inputs of one step: the latest token of each of S branches in L lanes, branches in the order of their lanes."""

    token_ids: np.ndarray  # int32 [S]
    positions: np.ndarray  # int32 [S], depth in its own branch
    branch: np.ndarray  # int32 [S]; TRUNK where the lane is the branch's own
    row: np.ndarray  # int32 [S], the lane
    limit: np.ndarray  # int32 [S], lane index of the token itself, the last that it sees
    slot_mapping: np.ndarray  # int32 [S]
    lanes: list[Lane]


class BranchLanes:
    """Record of the branches of one request, in either mode.

    Args:
        page_size: of the pool.
        branch_mode: "in_one_sequence" or "batching".

    Raises:
        ValueError: there is no such mode.
    """

    def __init__(self, page_size: int, branch_mode: str) -> None:
        if branch_mode not in BRANCH_MODES:
            raise ValueError(f"branch_mode must be one of {', '.join(BRANCH_MODES)}, got {branch_mode!r}")
        self.page_size, self.branch_mode = page_size, branch_mode
        self.trunk: BranchSequence | None = None
        self.sequences: dict[int, BranchSequence] = {}

    @property
    def trunk_len(self) -> int:
        """Tokens that all branches share, in whole pages."""
        return 0 if self.trunk is None else len(self.trunk.token_ids)

    def init_prefix(self, trunk: BranchSequence) -> None:
        """Set the trunk, which all branches start with.

        Raises:
            ValueError: it does not end with a page, or there are branches already.
        """
        if self.sequences:
            raise ValueError("the trunk is said before the first branch")
        if len(trunk.token_ids) % self.page_size:
            raise ValueError(f"a trunk has whole pages of {self.page_size} tokens, got {len(trunk.token_ids)} tokens")
        self.trunk = trunk

    def add_branch(self, branch: int, sequence: BranchSequence) -> None:
        """Add a branch, whose tokens start with the trunk's.

        Raises:
            ValueError: its number is taken or negative, or it does not start with the trunk.
        """
        if branch < 0 or branch in self.sequences:
            raise ValueError(f"branch {branch} is {'negative' if branch < 0 else 'there already'}")
        shared = self.trunk_len
        if self.trunk is not None and list(sequence.token_ids[:shared]) != list(self.trunk.token_ids):
            raise ValueError(f"branch {branch} does not begin with the trunk")
        if len(sequence.token_ids) <= shared:
            raise ValueError(f"branch {branch} has no token of its own")
        self.sequences[branch] = sequence

    def finish(self, branch: int) -> list[int]:
        """End a branch, and return its own pages, for the caller to free."""
        sequence = self.sequences.pop(branch)
        return list(sequence.pages[self.trunk_len // self.page_size :])

    @property
    def active_branches(self) -> list[int]:
        """Branches that have pages."""
        return [branch for branch, sequence in self.sequences.items() if sequence.pages]

    @property
    def branch_outputs(self) -> dict[int, list[int]]:
        """Tokens after each branch's prompt."""
        return {branch: list(s.token_ids[s.num_prompt_tokens :]) for branch, s in self.sequences.items()}

    def lanes(
        self,
        branches: Iterable[int] | None = None,
        *,
        max_pages: int | None = None,
        max_branches: int | None = None,
    ) -> list[Lane]:
        """Return the lanes in which a launch reads these branches; None: all that have pages.

        A branch whose table does not start with the same pages as the others' (the prefix cache may have given it equal
        ones) has a lane of its own.

        Args:
            max_pages, max_branches: of a lane that a launch can read; None: any number. Branches that do not fit into
                one lane are spread over several, each of which reads the trunk.
        """
        chosen = self.active_branches if branches is None else list(branches)
        if self.branch_mode == "batching":
            return [self._alone(branch) for branch in chosen]
        shared = self.trunk_len // self.page_size
        by_trunk: dict[tuple[int, ...], list[int]] = {}
        for branch in chosen:
            by_trunk.setdefault(tuple(self.sequences[branch].pages[:shared]), []).append(branch)
        lanes: list[Lane] = []
        for trunk, members in by_trunk.items():
            lanes += self._in_one_sequence(list(trunk), members, max_pages, max_branches)
        return lanes

    def _alone(self, branch: int) -> Lane:
        pages = list(self.sequences[branch].pages)
        shared = self.trunk_len // self.page_size
        return Lane(pages, [TRUNK] * len(pages), len(pages), (branch,), {branch: shared})

    def _in_one_sequence(
        self, trunk: list[int], members: Sequence[int], max_pages: int | None, max_branches: int | None
    ) -> list[Lane]:
        lanes: list[Lane] = []
        pages, owners, first_own = list(trunk), [TRUNK] * len(trunk), dict[int, int]()
        for branch in members:
            own = self.sequences[branch].pages[len(trunk) :]
            too_long = max_pages is not None and first_own and len(pages) + len(own) > max_pages
            if too_long or len(first_own) == max_branches:
                lanes.append(Lane(pages, owners, len(trunk), tuple(first_own), first_own))
                pages, owners, first_own = list(trunk), [TRUNK] * len(trunk), {}
            first_own[branch] = len(pages)
            pages.extend(own)
            owners.extend([branch] * len(own))
        lanes.append(Lane(pages, owners, len(trunk), tuple(first_own), first_own))
        return lanes

    def get_tip_positions(self) -> dict[int, int]:
        """Return the position of the latest token of each branch."""
        return {branch: len(sequence.token_ids) - 1 for branch, sequence in self.sequences.items()}

    def get_branch_tip_indices(self) -> dict[int, tuple[int, int]]:
        """Return for each branch that has pages the number of its lane and the lane index of its latest token."""
        positions = self.get_tip_positions()
        return {
            branch: (number, self._lane_index(lane, branch, positions[branch]))
            for number, lane in enumerate(self.lanes())
            for branch in lane.branches
        }

    def _lane_index(self, lane: Lane, branch: int, position: int) -> int:
        own = position // self.page_size - self.trunk_len // self.page_size
        return (lane.first_own[branch] + own) * self.page_size + position % self.page_size

    def prepare_decode_inputs(self, branches: Iterable[int] | None = None) -> DecodeInputs:
        """Return the inputs of a step that computes the latest token of each of these branches, for the next one."""
        lanes = self.lanes(branches)
        rows = [(number, lane, branch) for number, lane in enumerate(lanes) for branch in lane.branches]
        positions = self.get_tip_positions()
        limits = [self._lane_index(lane, branch, positions[branch]) for _, lane, branch in rows]
        size = self.page_size
        columns = {
            "token_ids": [self.sequences[branch].token_ids[-1] for *_, branch in rows],
            "positions": [positions[branch] for *_, branch in rows],
            "branch": [branch if self.branch_mode == "in_one_sequence" else TRUNK for *_, branch in rows],
            "row": [number for number, *_ in rows],
            "limit": limits,
            "slot_mapping": [
                lane.pages[limit // size] * size + limit % size
                for (_, lane, _), limit in zip(rows, limits, strict=True)
            ],
        }
        return DecodeInputs(**{name: np.asarray(column, np.int32) for name, column in columns.items()}, lanes=lanes)

    def bim(self, lane: Lane) -> np.ndarray:
        """Return int32 [P * page_size]: the owner of every slot of a lane, TRUNK, EMPTY or a branch."""
        size, batching = self.page_size, self.branch_mode == "batching"
        trunk_len = lane.trunk_pages * size
        written = list(range(self.trunk_len))
        for branch in lane.branches:
            first = lane.first_own[branch] * size
            written += range(first, first + len(self.sequences[branch].token_ids) - self.trunk_len)
        return branch_index_map(size, lane.owners, trunk_len if batching else self.trunk_len, written)


BranchStateManager = BranchLanes  # the sources' name, by which it was known here before
