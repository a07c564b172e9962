"""Branches aligned by left padding, as in SpecSoT's batching mode: a view for readers and tests.

The engine packs rows of any lengths and pads nothing. Here a round is one rectangle, and every branch has a row of one
cache. All rows grow by the width of the rectangle; a branch with fewer tokens is padded on the left. The slots of
padding are holes in the branch's row, and no later token may see them.

There are three lengths, two of which the design of SpecSoT calls by the same name (caches of 100, 98 and 99 tokens, yet
all caches equally long):

- `cache_length`: slots of a row, equal for all branches; the next round is written after them.
- `valid_lengths`, which SpecSoT's manager calls `cache_lengths`: tokens of each branch, which is its slots without the
  holes, and the position of its next token.
- `input_lengths`: tokens of each branch in one round.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.textbook.devices import Array, Device, device_of, placed

type Tokens = Sequence[int] | Array


@dataclass(frozen=True, eq=False)
class AlignmentState:
    """One round: B branches in L columns, whose KV goes to the last L of C slots.

    It unpacks into what SpecSoT's `align_for_decode` returns: input_ids, padding_mask, position_ids. That mask says
    nothing of the holes that earlier rounds left in the cache; attention needs `query_mask`.
    """

    branch_ids: tuple[int, ...]  # of the rows
    input_ids: Array  # int32 [B, L], left padded
    position_ids: Array  # int32 [B, L], depth of the token in its own branch; 0 for padding
    attention_mask: Array  # bool [B, C]: slots that hold a token of the row's branch, this round's among them

    def __iter__(self) -> Iterator[Array | list[bool]]:
        yield from (self.input_ids, self.padding_mask, self.position_ids)

    @property
    def cache_length(self) -> int:
        """C, slots of every row after this round."""
        return self.attention_mask.shape[1]

    @property
    def padding_mask(self) -> Array:
        """bool [B, L]: True for tokens, False for padding."""
        return self.attention_mask[:, self.cache_length - self.input_ids.shape[1] :]

    @property
    def valid_lengths(self) -> Array:
        """int32 [B]: tokens of each branch after this round.

        SpecSoT's `ContinuousDecodingState` means the same; its `AlignmentState.valid_lengths` are `input_lengths` here.
        """
        return self.attention_mask.sum(axis=1, dtype=np.int32)

    @property
    def input_lengths(self) -> Array:
        """int32 [B]: tokens of each branch in this round."""
        return self.padding_mask.sum(axis=1, dtype=np.int32)

    @property
    def padding_lengths(self) -> Array:
        """int32 [B]: columns of padding in each row."""
        return self.input_ids.shape[1] - self.input_lengths

    @property
    def position_offsets(self) -> Array:
        """int32 [B]: what to take from a column's number for the place of its token among the branch's new ones.

        A token's position is the branch's valid length before the round, plus its column, minus this offset. So the
        offsets are the padding lengths; SpecSoT lists both.
        """
        return self.padding_lengths

    @property
    def query_mask(self) -> Array:
        """bool [B, L, C]: the slots that each query sees, itself and the tokens of its branch before it.

        Padding sees nothing.
        """
        slots = np.arange(self.cache_length)
        own = slots[self.cache_length - self.input_ids.shape[1] :]
        return self.padding_mask[:, :, None] & self.attention_mask[:, None, :] & (slots <= own[:, None])


@dataclass(frozen=True, eq=False)
class ContinuousDecodingState(AlignmentState):
    """A round that decodes some branches and prefills new ones.

    It unpacks into what SpecSoT's `align_continuous_decode` returns: input_ids, query_mask, position_ids, is_prefill.
    """

    is_prefill: Array  # bool [B]

    def __iter__(self) -> Iterator[Array | list[bool]]:
        yield from (self.input_ids, self.query_mask, self.position_ids, self.is_prefill.tolist())


class AlignmentManager:
    """Manager of the slots that each branch's cache row fills, and of the rounds that fill them.

    Branches have ids that never change and are never reused; a round's rows are in the order of `branch_ids`. A caller
    keeps the cache of branch b in row b of its arrays and takes the rows `branch_ids`.

    The bookkeeping is on the host, because the shapes of a round follow from it. Results are JAX arrays on `device`;
    without one they are NumPy arrays. Neither can be written to.

    Attributes:
        num_branches: number of branches that it started with.
        branch_ids: branches that are in rounds.
    """

    def __init__(
        self,
        num_branches: int,
        device: Device | int = None,
        pad_token_id: int | None = None,
        *,
        prefix_len: int = 0,
    ) -> None:
        """Start with branches 0 to `num_branches` - 1, and a prefix of `prefix_len` tokens in the row of each.

        Args:
            device: a jax.Device or a name such as "cpu" or "cuda:0"; None: results are NumPy arrays. An integer is
                taken for `pad_token_id`, which had this place before, with a DeprecationWarning.
            pad_token_id: token id of padding, 0 by default. SpecSoT's class reads one that it is never given.

        Raises:
            ValueError: there is no such device, or `pad_token_id` is given twice.
        """
        if isinstance(device, int):
            if pad_token_id is not None:
                raise ValueError(
                    f"device: {device!r}, allowed are None, a jax.Device or a name; pad_token_id is {pad_token_id!r}"
                )
            warnings.warn(
                "AlignmentManager(num_branches, pad_token_id) takes a device in second place now; "
                "give pad_token_id by its name",
                DeprecationWarning,
                stacklevel=2,
            )
            device, pad_token_id = None, device
        self.num_branches = num_branches
        self.device = None if device is None else device_of(device)
        self.pad_token_id = 0 if pad_token_id is None else pad_token_id
        self.prefix_len = prefix_len
        self.branch_ids: tuple[int, ...] = tuple(range(num_branches))
        self._held = np.ones((num_branches, prefix_len), bool)  # [B, cache_length], of the rows `branch_ids`
        self._padding = np.zeros(num_branches, np.int32)  # [B], of the latest round
        self._next_id = num_branches

    @property
    def cache_length(self) -> int:
        """Slots of every row so far."""
        return self._held.shape[1]

    @property
    def attention_mask(self) -> Array:
        """bool [B, cache_length]: the slots of each row that hold a token of its branch."""
        return self._placed(self._held)

    @property
    def valid_lengths(self) -> Array:
        """int32 [B]: tokens of each branch so far."""
        return self._placed(self._valid_lengths())

    @property
    def cache_lengths(self) -> Array:
        """int32 [B]: tokens of each branch so far, `valid_lengths` under SpecSoT's name.

        Before the first round they can be assigned, for rows that were filled elsewhere: the prefix, then a hole up to
        the longest row, then the branch's own tokens.

        Raises:
            ValueError: there was a round; or there is not one length for each branch, of the prefix at least.
        """
        return self.valid_lengths

    @cache_lengths.setter
    def cache_lengths(self, lengths: Sequence[int] | Array) -> None:
        self._check_rows("cache_lengths", lengths)
        own = np.asarray(lengths, np.int32) - self.prefix_len
        if self.cache_length != self.prefix_len:
            raise ValueError(f"cache_lengths: assigned after a round; the rows hold {self._valid_lengths().tolist()}")
        if own.min(initial=0) < 0:
            raise ValueError(
                f"cache_lengths: {list(lengths)}, allowed are lengths from prefix_len={self.prefix_len} on"
            )
        width = int(own.max(initial=0))
        self._held = np.concatenate([self._held, np.arange(width) >= width - own[:, None]], axis=1)

    @property
    def padding_lengths(self) -> Array:
        """int32 [B]: columns of padding of each row in the latest round."""
        return self._placed(self._padding)

    @property
    def position_offsets(self) -> Array:
        """int32 [B]: offsets of the latest round, see `AlignmentState.position_offsets`."""
        return self.padding_lengths

    def align_for_decode(
        self, accept_lengths: Sequence[int] | Array, accepted_tokens: Sequence[Tokens]
    ) -> AlignmentState:
        """Return the round after a verification, with the tokens that each branch has accepted.

        SpecSoT's rounds mask their own padding only; the holes of earlier rounds would stay visible. Take the mask from
        `AlignmentState.query_mask`.

        Args:
            accept_lengths: [B], in the order of `branch_ids`; 0 adds only a hole to a branch.
            accepted_tokens: at least as many tokens as each branch accepts; further ones are dropped.

        Raises:
            ValueError: there is not one length and one list of tokens for each branch, or a length exceeds its tokens.
        """
        self._check_rows("accept_lengths", accept_lengths)
        self._check_rows("accepted_tokens", accepted_tokens)
        inputs: list[np.ndarray] = []
        for branch, length, tokens in zip(self.branch_ids, accept_lengths, accepted_tokens, strict=True):
            count = int(length)
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
        self._held = np.concatenate([self._held, joining])
        self.branch_ids += tuple(range(self._next_id, self._next_id + num_new))
        self._next_id += num_new
        is_prefill = self._placed(np.arange(num_old + num_new) >= num_old)
        return ContinuousDecodingState(self.branch_ids, *self._append(inputs), is_prefill)

    def truncate(self, cache_length: int) -> None:
        """Forget the rounds that were written to the slots from `cache_length` on, of all branches.

        Raises:
            ValueError: the rows are shorter than that, or it would cut the prefix.
        """
        if not self.prefix_len <= cache_length <= self.cache_length:
            raise ValueError(f"cache_length: {cache_length}, allowed are {self.prefix_len} to {self.cache_length}")
        self._held, self._padding = self._held[:, :cache_length], np.zeros_like(self._padding)

    def remove_branch(self, branch_id: int) -> None:
        """Leave a finished branch out of later rounds; the others keep their ids.

        Raises:
            ValueError: there is no such branch, or no longer.
        """
        if branch_id not in self.branch_ids:
            raise ValueError(f"branch_id: {branch_id} is none of {self.branch_ids}")
        row = self.branch_ids.index(branch_id)
        self._held, self._padding = np.delete(self._held, row, axis=0), np.delete(self._padding, row)
        self.branch_ids = tuple(branch for branch in self.branch_ids if branch != branch_id)

    def _append(self, inputs: Sequence[np.ndarray]) -> tuple[Array, Array, Array]:
        """Extend every row by the longest input; returns input_ids, position_ids and attention_mask."""
        lengths = np.array([len(tokens) for tokens in inputs], np.int32)
        width = int(lengths.max(initial=0))
        is_token = np.arange(width) >= width - lengths[:, None]
        input_ids = np.full(is_token.shape, self.pad_token_id, np.int32)
        input_ids[is_token] = np.concatenate([*inputs, np.empty(0, np.int32)])
        depth = self._valid_lengths()[:, None] + np.cumsum(is_token, axis=1, dtype=np.int32) - 1
        # A new array, because the states of earlier rounds still hold the old one.
        self._held = np.concatenate([self._held, is_token], axis=1)
        self._padding = width - lengths
        return self._placed(input_ids), self._placed(np.where(is_token, depth, 0)), self.attention_mask

    def _valid_lengths(self) -> np.ndarray:
        return self._held.sum(axis=1, dtype=np.int32)

    def _placed(self, values: np.ndarray) -> Array:
        return placed(values, self.device)

    def _check_rows(self, name: str, values: Sequence[object] | Array) -> None:
        if len(values) != len(self.branch_ids):
            raise ValueError(f"{name}: {len(values)} of them for the {len(self.branch_ids)} branches {self.branch_ids}")
