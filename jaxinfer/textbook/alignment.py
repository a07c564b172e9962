"""Branches aligned by left padding, as in SpecSoT's batching mode: a view for readers and tests.

The engine packs rows of any lengths and pads nothing. Here a round is one rectangle, and every branch has a row of one
cache. All rows grow by the width of the rectangle; a branch with fewer tokens is padded on the left. The slots of
padding are holes in the branch's row, and no later token may see them.

There are three lengths, two of which the design of SpecSoT calls by the same name (caches of 100, 98 and 99 tokens, yet
all caches equally long):

- `cache_length`: slots of a row, equal for all branches; the next round is written after them.
- `valid_lengths`: tokens of each branch, which is its slots without the holes, and the position of its next token.
- `input_lengths`: tokens of each branch in one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

type Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False)
class AlignmentState:
    """One round: B branches in L columns, whose KV goes to the last L of C slots."""

    branch_ids: tuple[int, ...]  # of the rows
    input_ids: np.ndarray  # int32 [B, L], left padded
    position_ids: np.ndarray  # int32 [B, L], depth of the token in its own branch; 0 for padding
    attention_mask: np.ndarray  # bool [B, C]: slots that hold a token of the row's branch, this round's among them

    @property
    def cache_length(self) -> int:
        """C, slots of every row after this round."""
        return self.attention_mask.shape[1]

    @property
    def padding_mask(self) -> np.ndarray:
        """bool [B, L]: True for tokens, False for padding."""
        return self.attention_mask[:, self.cache_length - self.input_ids.shape[1] :]

    @property
    def valid_lengths(self) -> np.ndarray:
        """int32 [B]: tokens of each branch after this round."""
        return self.attention_mask.sum(axis=1, dtype=np.int32)

    @property
    def input_lengths(self) -> np.ndarray:
        """int32 [B]: tokens of each branch in this round."""
        return self.padding_mask.sum(axis=1, dtype=np.int32)

    @property
    def padding_lengths(self) -> np.ndarray:
        """int32 [B]: columns of padding in each row."""
        return self.input_ids.shape[1] - self.input_lengths

    @property
    def query_mask(self) -> np.ndarray:
        """bool [B, L, C]: the slots that each query sees, itself and the tokens of its branch before it.

        Padding sees nothing.
        """
        slots = np.arange(self.cache_length)
        own = slots[self.cache_length - self.input_ids.shape[1] :]
        return self.padding_mask[:, :, None] & self.attention_mask[:, None, :] & (slots <= own[:, None])


@dataclass(frozen=True, eq=False)
class ContinuousDecodingState(AlignmentState):
    """A round that decodes some branches and prefills new ones."""

    is_prefill: np.ndarray  # bool [B]


class AlignmentManager:
    """Manager of the slots that each branch's cache row fills, and of the rounds that fill them.

    Branches have ids that never change and are never reused; a round's rows are in the order of `branch_ids`. A caller
    keeps the cache of branch b in row b of its arrays and takes the rows `branch_ids`.
    """

    def __init__(self, num_branches: int, pad_token_id: int = 0, *, prefix_len: int = 0) -> None:
        """Start with branches 0 to `num_branches` - 1, and a prefix of `prefix_len` tokens in the row of each."""
        self.pad_token_id = pad_token_id
        self.prefix_len = prefix_len
        self.branch_ids: tuple[int, ...] = tuple(range(num_branches))
        self.attention_mask = np.ones((num_branches, prefix_len), bool)  # [B, cache_length], of the rows `branch_ids`
        self._next_id = num_branches

    @property
    def cache_length(self) -> int:
        """Slots of every row so far."""
        return self.attention_mask.shape[1]

    @property
    def valid_lengths(self) -> np.ndarray:
        """int32 [B]: tokens of each branch so far."""
        return self.attention_mask.sum(axis=1, dtype=np.int32)

    def align_for_decode(
        self, accept_lengths: Sequence[int] | np.ndarray, accepted_tokens: Sequence[Tokens]
    ) -> AlignmentState:
        """Return the round after a verification, with the tokens that each branch has accepted.

        Args:
            accept_lengths: [B], in the order of `branch_ids`; 0 adds only a hole to a branch.
            accepted_tokens: at least as many tokens as each branch accepts; further ones are dropped.

        Raises:
            ValueError: there is not one length and one list of tokens for each branch, or a length exceeds its tokens.
        """
        self._check_rows("accept_lengths", accept_lengths)
        self._check_rows("accepted_tokens", accepted_tokens)
        inputs: list[np.ndarray] = []
        for branch, count, tokens in zip(self.branch_ids, accept_lengths, accepted_tokens, strict=True):
            if not 0 <= count <= len(tokens):
                raise ValueError(f"accept_lengths: {count} of branch {branch}, which has {len(tokens)} accepted tokens")
            inputs.append(np.asarray(tokens[:count], np.int32))
        return AlignmentState(self.branch_ids, *self._append(inputs))

    def align_continuous_decode(
        self, new_branch_prompts: Sequence[Tokens], old_branch_tokens: Sequence[Tokens]
    ) -> ContinuousDecodingState:
        """Return a round in which new branches join, in the last rows and under the next free ids.

        Before its prompt a new branch has the prefix, and a hole for the slots that the others wrote since. The old
        branches are padded to the longest prompt: the price of one rectangle, which ragged rows save.

        Args:
            new_branch_prompts: tokens of each new branch after the prefix.
            old_branch_tokens: tokens of the old branches, in the order of `branch_ids`; any may be empty.

        Raises:
            ValueError: there is not one list of tokens for each old branch.
        """
        self._check_rows("old_branch_tokens", old_branch_tokens)
        inputs = [np.asarray(tokens, np.int32) for tokens in (*old_branch_tokens, *new_branch_prompts)]
        num_old, num_new = len(old_branch_tokens), len(new_branch_prompts)
        joining = np.tile(np.arange(self.cache_length) < self.prefix_len, (num_new, 1))
        self.attention_mask = np.concatenate([self.attention_mask, joining])
        self.branch_ids += tuple(range(self._next_id, self._next_id + num_new))
        self._next_id += num_new
        is_prefill = np.arange(num_old + num_new) >= num_old
        return ContinuousDecodingState(self.branch_ids, *self._append(inputs), is_prefill)

    def remove_branch(self, branch_id: int) -> None:
        """Leave a finished branch out of later rounds; the others keep their ids.

        Raises:
            ValueError: there is no such branch, or no longer.
        """
        if branch_id not in self.branch_ids:
            raise ValueError(f"branch_id: {branch_id} is none of {self.branch_ids}")
        self.attention_mask = np.delete(self.attention_mask, self.branch_ids.index(branch_id), axis=0)
        self.branch_ids = tuple(branch for branch in self.branch_ids if branch != branch_id)

    def _append(self, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Extend every row by the longest input; returns input_ids, position_ids and attention_mask."""
        lengths = np.array([len(tokens) for tokens in inputs], np.int32)
        width = int(lengths.max(initial=0))
        is_token = np.arange(width) >= width - lengths[:, None]
        input_ids = np.full(is_token.shape, self.pad_token_id, np.int32)
        input_ids[is_token] = np.concatenate([*inputs, np.empty(0, np.int32)])
        depth = self.valid_lengths[:, None] + np.cumsum(is_token, axis=1, dtype=np.int32) - 1
        # A new array, because the states of earlier rounds still hold the old one.
        self.attention_mask = np.concatenate([self.attention_mask, is_token], axis=1)
        return input_ids, np.where(is_token, depth, 0), self.attention_mask

    def _check_rows(self, name: str, values: Sequence[object] | np.ndarray) -> None:
        if len(values) != len(self.branch_ids):
            raise ValueError(f"{name}: {len(values)} of them for the {len(self.branch_ids)} branches {self.branch_ids}")
