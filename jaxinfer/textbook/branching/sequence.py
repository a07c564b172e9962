"""All branches as one sequence: which branch, token and position every index has, in the order of their writing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.branching.bim import EMPTY, TRUNK
from jaxinfer.textbook.alignment import AlignmentManager, Tokens
from jaxinfer.textbook.devices import Array, Device

UNKNOWN = -1  # token of a prefix, whose tokens a state manager is not told


class OneSequence:
    """The prefix, then the tokens of branches as they came: contiguous at first, interleaved after the first round.

    BIM mode has its KV at these indices; a drafter has its own there in either mode. An index never changes: the
    tokens of a branch that is removed leave a hole. (In the engine a branch's pages are freed.)
    """

    def __init__(self, prefix_len: int) -> None:
        self.prefix_len = prefix_len
        self._owners = [TRUNK] * prefix_len
        self._tokens = [UNKNOWN] * prefix_len
        self._positions = list(range(prefix_len))

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def bim(self) -> np.ndarray:
        """int32 [S]: the Branch Index Map, -1 for the prefix, -2 where a branch was removed, else the branch."""
        return np.asarray(self._owners, np.int32)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [S]; -1 for the prefix."""
        return np.asarray(self._tokens, np.int32)

    @property
    def position_ids(self) -> np.ndarray:
        """int32 [S]: depth of each token in its own branch."""
        return np.asarray(self._positions, np.int32)

    def indices_of(self, branch: int) -> np.ndarray:
        """Return int [N], the indices of a branch's own tokens in their order."""
        return np.flatnonzero(self.bim == branch)

    def before(self, indices: np.ndarray) -> np.ndarray:
        """Return int [N], the index of the token before each of N tokens of branches, in its branch or the prefix."""
        bim, found = self.bim, np.full(len(self), self.prefix_len - 1)
        for branch in set(bim[indices].tolist()):
            own = np.flatnonzero(bim == branch)
            found[own[1:]] = own[:-1]
        return found[indices]

    def extend(self, branch: int, tokens: Sequence[int]) -> int:
        """Write tokens of a branch after everything else; returns the index of the first."""
        start, depth = len(self), self.prefix_len + self._owners.count(branch)
        self._owners += [branch] * len(tokens)
        self._tokens += tokens
        self._positions += range(depth, depth + len(tokens))
        return start

    def remove(self, branch: int) -> None:
        """Leave holes where a branch is."""
        self._owners = [EMPTY if owner == branch else owner for owner in self._owners]


def accepted_by_branch(
    branches: Sequence[int], accept_lengths: Sequence[int] | Array, accepted_tokens: Sequence[Tokens]
) -> dict[int, list[int]]:
    """Return the tokens that each branch has accepted.

    Raises:
        ValueError: there is not one length and one list of tokens for each branch, or a length exceeds its tokens.
    """
    for name, values in (("accept_lengths", accept_lengths), ("accepted_tokens", accepted_tokens)):
        if len(values) != len(branches):
            raise ValueError(f"{name}: {len(values)} of them for the branches {list(branches)}")
    found: dict[int, list[int]] = {}
    for branch, length, tokens in zip(branches, accept_lengths, accepted_tokens, strict=True):
        count = int(length)
        if not 0 <= count <= len(tokens):
            raise ValueError(f"accept_lengths: {count} of branch {branch}, which has {len(tokens)} accepted tokens")
        found[branch] = np.asarray(tokens, np.int32)[:count].tolist()
    return found


def rows_of_batch(
    sequence: OneSequence, branches: Sequence[int], num_rows: int, device: Device
) -> tuple[AlignmentManager, tuple[np.ndarray, np.ndarray]]:
    """Return rows that hold a branch each, and where every slot of them finds its KV in one sequence.

    Args:
        branches: of the first rows; further rows have the prefix only.

    Returns:
        A manager of `num_rows` rows; and rows, slots: int32 [num_rows, C], for `KVCache.gathered`, -1 for holes.
    """
    own = [sequence.indices_of(branch) for branch in branches]
    own += [np.empty(0, np.int64)] * (num_rows - len(own))
    alignment = AlignmentManager(num_rows, device, prefix_len=sequence.prefix_len)
    alignment.cache_lengths = [sequence.prefix_len + len(indices) for indices in own]
    held = np.asarray(alignment.attention_mask)
    slots = np.full(held.shape, -1, np.int32)
    for row, indices in enumerate(own):
        slots[row, held[row]] = [*range(sequence.prefix_len), *indices]
    return alignment, (np.minimum(slots, 0), slots)


def one_row(sequence: OneSequence, held: dict[int, tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return where every index of one sequence finds its KV in the rows of a batch.

    Args:
        held: of each branch, its row in the batch's cache and bool [C], the slots of it that hold a token.

    Returns:
        rows, slots: int32 [1, S], for `KVCache.gathered`; -1 for holes.
    """
    rows, slots = np.full((2, 1, len(sequence)), -1, np.int32)
    rows[0, : sequence.prefix_len], slots[0, : sequence.prefix_len] = 0, np.arange(sequence.prefix_len)
    for branch, (row, mask) in held.items():
        own = sequence.indices_of(branch)
        rows[0, own], slots[0, own] = row, np.flatnonzero(mask)[sequence.prefix_len :]
    return rows, slots
