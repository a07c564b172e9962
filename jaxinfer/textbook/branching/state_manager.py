"""`BranchStateManager`: the state of all branches in SpecSoT's two modes, under its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.branching.bim import EMPTY, bim_mask
from jaxinfer.field_checks import check_positive_integer
from jaxinfer.textbook.alignment import AlignmentManager, AlignmentState, ContinuousDecodingState, Tokens
from jaxinfer.textbook.branching.kv_cache import KVCache, ModelKVCache, check_prefix_cache
from jaxinfer.textbook.branching.masks import additive_mask, seen_by_newest
from jaxinfer.textbook.branching.sequence import OneSequence, accepted_by_branch, one_row, rows_of_batch
from jaxinfer.textbook.devices import Array, Device, device_of, placed

type Inputs = tuple[Array, Array, Array]  # input_ids, attention_mask, position_ids


class BranchStateManager:
    """Record of what every branch holds, and of the inputs that compute more of it, in one of two modes.

    In BIM mode all branches are one sequence, whose cache has one row, and the Branch Index Map says whose each index
    is. In batching mode a branch has a row of its own: the prefix is copied into each, and rounds are rectangles padded
    on the left (see `AlignmentManager`). The engine's batching copies and pads nothing: rows are ragged and share pages
    (`jaxinfer.branching.branch_state`).

    Differences from the source: the mask of accepted tokens is causal within their branch; a branch's tokens need not
    be side by side; a branch may accept nothing, and can be removed; tokens beyond `accept_lengths` are dropped.

    The record is on the host; results are arrays on `device`, or read-only NumPy arrays without one.

    Attributes:
        prefix_len: tokens that all branches share.
        active_branches: ids of the branches, in the order of `accept_lengths`.
        branch_outputs: all own tokens of each branch, its prompt among them; removed ones keep theirs.
        one_sequence: all branches as one sequence, in either mode: what a drafter that always has one sequence reads.
        rows: in batching mode the row of each branch in the caches; removed branches keep theirs.
        cache: in BIM mode the cache that `init_prefix` was given; in batching mode its copies, a row for each branch.
    """

    def __init__(self, capacity: int, device: Device = None, use_bim_mode: bool = False, num_branches: int = 1) -> None:
        """Start without a prefix.

        Args:
            capacity: slots of the cache's row in BIM mode, which all branches share, and of each row in batching mode.
            device: a jax.Device or a name such as "cpu" or "cuda:0"; None: results are NumPy arrays.
            use_bim_mode: whether all branches are one sequence.
            num_branches: rows in batching mode, of all branches that there ever are. In BIM mode any number of branches
                can be added, and this one counts when the mode is switched.

        Raises:
            ValueError: a number is not an integer of at least 1, or there is no such device.
        """
        check_positive_integer("capacity", capacity)
        check_positive_integer("num_branches", num_branches)
        self.capacity, self.num_branches, self.use_bim_mode = capacity, num_branches, bool(use_bim_mode)
        self.device = None if device is None else device_of(device)
        self.prefix_len = 0
        self.active_branches: list[int] = []
        self.branch_outputs: dict[int, list[int]] = {}
        self.cache: KVCache | ModelKVCache | None = None
        self.one_sequence = OneSequence(0)
        self._alignment = None if use_bim_mode else AlignmentManager(num_branches, self.device)
        self.rows: dict[int, int] = {}
        # Prompts that no round has computed yet; in batching mode they are one rectangle.
        self._open: dict[int, list[int]] = {}
        self._open_start = 0
        self._open_round: AlignmentState | None = None

    @property
    def bim(self) -> Array:
        """int32 [capacity], in BIM mode: -2 empty, -1 prefix, else the branch. It is a snapshot."""
        return self._one_sequence("bim", EMPTY, self.one_sequence.bim)

    @property
    def position_ids(self) -> Array:
        """int32 [capacity], in BIM mode: depth of each token in its own branch; 0 where there is none."""
        return self._one_sequence("position_ids", 0, self.one_sequence.position_ids)

    @property
    def current_length(self) -> int:
        """Indices of the one sequence that are in use, in BIM mode."""
        if not self.use_bim_mode:
            raise AttributeError("current_length: batching mode has alignment_manager.cache_length")
        return len(self.one_sequence)

    @property
    def alignment_manager(self) -> AlignmentManager:
        """Manager of the rows, in batching mode."""
        if self._alignment is None:
            raise AttributeError("alignment_manager: BIM mode aligns nothing, it has bim and position_ids")
        return self._alignment

    @property
    def branch_cache_lengths(self) -> dict[int, int]:
        """Tokens of each active branch, the prefix included."""
        return {branch: self.prefix_len + len(self.branch_outputs[branch]) for branch in self.active_branches}

    @property
    def branch_tips(self) -> dict[int, int]:
        """Index of each active branch's latest token in the one sequence, or its slot in the branch's row."""
        if self.use_bim_mode:
            return {branch: int(self.one_sequence.indices_of(branch)[-1]) for branch in self.active_branches}
        return {branch: int(np.flatnonzero(self._held(branch))[-1]) for branch in self.active_branches}

    def init_prefix(self, prefix_len: int, prefix_cache: KVCache | ModelKVCache | None = None) -> None:
        """Set the shared prefix.

        Args:
            prefix_len: number of its tokens.
            prefix_cache: its KV, in one row. BIM mode keeps it as `cache` and copies nothing. Batching mode copies it
                once into each row of a new `cache`: the price of separate rows, which shared pages save.

        Raises:
            ValueError: there is a prefix or a branch already, or the cache or `capacity` does not fit the prefix.
        """
        if self.active_branches or self.branch_outputs or self.prefix_len:
            raise ValueError(
                f"prefix_len: {prefix_len}, but there is a prefix of {self.prefix_len} or a branch already"
            )
        if not 0 <= prefix_len <= self.capacity:
            raise ValueError(f"prefix_len: {prefix_len}, allowed are 0 to the capacity, {self.capacity}")
        if prefix_cache is not None:
            check_prefix_cache(prefix_cache, prefix_len, self.capacity if self.use_bim_mode else 0)
            self.cache = prefix_cache if self.use_bim_mode else prefix_cache.repeated(self.num_branches, self.capacity)
        self.prefix_len, self.one_sequence = prefix_len, OneSequence(prefix_len)
        if self._alignment is not None:
            pad = self._alignment.pad_token_id
            self._alignment = AlignmentManager(self.num_branches, self.device, pad, prefix_len=prefix_len)

    def add_branch(self, branch_id: int, tokens: Tokens) -> int:
        """Add a branch with its prompt; returns where the prompt starts.

        In BIM mode that is its index in the one sequence. In batching mode it is its place among the tokens of the
        branch's row, which is `prefix_len` for all; branches that are added between two rounds are one rectangle.

        Raises:
            ValueError: the id is negative or was used, there is no token, or no room.
        """
        prompt = self._check_new(branch_id, tokens)
        if self.use_bim_mode:
            self._check_room(len(self.one_sequence) + len(prompt))
        else:
            self._check_rows(1)
            if not self._open:
                self._open_start = self.alignment_manager.cache_length
            widest = max(map(len, (prompt, *self._open.values())))
            self._check_room(self._open_start + widest)
        start = self._enter(branch_id, prompt)
        self._open[branch_id] = prompt
        self._align_open()
        return start if self.use_bim_mode else self.prefix_len

    def remove_branch(self, branch_id: int) -> None:
        """Leave a finished branch out of later rounds. Its outputs stay, and no other branch moves.

        In BIM mode its indices become empty, in batching mode its row is not used again. The source ends no branch.

        Raises:
            ValueError: there is no such branch, or no longer.
        """
        if branch_id not in self.active_branches:
            raise ValueError(f"branch_id: {branch_id} is none of {self.active_branches}")
        self.active_branches.remove(branch_id)
        self.one_sequence.remove(branch_id)
        was_open = self._open.pop(branch_id, None) is not None
        if self._alignment is not None:
            self._alignment.remove_branch(self.rows[branch_id])
            if was_open or self._open:
                self._align_open()

    def prepare_prefill_inputs(self) -> AlignmentState | Inputs:
        """Return the inputs that compute the prompts of the branches that were added since the latest round.

        Returns:
            In BIM mode input_ids [1, N], attention_mask [1, 1, N, current_length], position_ids [1, N], whose KV goes
            to the last N indices. In batching mode an `AlignmentState`, which unpacks into three as well.

        Raises:
            ValueError: no branch was added.
        """
        if not self._open:
            raise ValueError("there is no branch whose prompt has not been computed; add_branch comes first")
        count = sum(map(len, self._open.values()))
        found = self._open_round if self._open_round is not None else self._newest(count)
        self._close()
        return found

    def prepare_decode_inputs(
        self, accept_lengths: Sequence[int] | Array, accepted_tokens: Sequence[Tokens]
    ) -> AlignmentState | Inputs:
        """Return the inputs that compute the tokens that each branch has accepted, and record them.

        Args:
            accept_lengths: [num active branches], in the order of `active_branches`; may be 0.
            accepted_tokens: at least as many tokens as each branch accepts; further ones are dropped.

        Returns:
            As `prepare_prefill_inputs`: in BIM mode the tokens of all branches one after the other; in batching mode a
            rectangle as wide as the longest.

        Raises:
            ValueError: there is not one length and one list for each branch, a length exceeds its tokens, or no room.
        """
        return self._round(accept_lengths, accepted_tokens, {})

    def prepare_continuous_inputs(
        self,
        accept_lengths: Sequence[int] | Array,
        accepted_tokens: Sequence[Tokens],
        new_branches: Mapping[int, Tokens],
    ) -> ContinuousDecodingState | Inputs:
        """Return the inputs of a round that decodes the active branches and prefills new ones (continuous decoding).

        In BIM mode that is one sequence of all their tokens, old branches first. In batching mode old branches are
        padded to the longest prompt, and the slots that they have written since the prefix are a hole of the new ones.

        Args:
            accept_lengths, accepted_tokens: as for `prepare_decode_inputs`.
            new_branches: the id and the prompt of each new branch.

        Raises:
            ValueError: as for `prepare_decode_inputs` and `add_branch`.
        """
        found = self._round(accept_lengths, accepted_tokens, new_branches)
        if not isinstance(found, AlignmentState):
            return found
        new_rows = [self.rows[branch] for branch in new_branches]
        is_prefill = placed(np.isin(found.branch_ids, new_rows), self.device)
        return ContinuousDecodingState(
            found.branch_ids, found.input_ids, found.position_ids, found.attention_mask, is_prefill
        )

    def get_branch_tip_indices(self) -> Array:
        """Return int32 [num active branches], the values of `branch_tips`."""
        return self._placed(np.array([*self.branch_tips.values()], np.int32))

    def get_tip_token_ids(self) -> Array:
        """Return int32 [num active branches], the latest token of each."""
        return self._placed(np.array([self.branch_outputs[branch][-1] for branch in self.active_branches], np.int32))

    def get_tip_positions(self) -> Array:
        """Return int32 [num active branches], the position of each one's latest token."""
        return self._placed(np.array([*self.branch_cache_lengths.values()], np.int32) - 1)

    def build_prefill_attention_mask(self, query_len: int, dtype: Any = jnp.float32) -> Array:
        """Return the mask of the sequence's last `query_len` tokens, [1, 1, query_len, current_length].

        It is added to scores: 0 where a key is seen, else the dtype's least value; with dtype bool it is True and
        False. A token sees the prefix and its own branch, up to itself.

        Raises:
            ValueError: in batching mode; or the sequence has fewer tokens.
        """
        if not self.use_bim_mode:
            raise ValueError("use_bim_mode=False: use a standard attention mask for batching mode")
        length, bim = len(self.one_sequence), self.one_sequence.bim
        if not 0 <= query_len <= length:
            raise ValueError(f"query_len: {query_len}, allowed are 0 to {length}")
        indices = np.arange(length - query_len, length)
        return self._placed(additive_mask(bim_mask(bim, bim[indices], indices), dtype))

    def build_decode_attention_mask(self, query_bim: Sequence[int] | Array, dtype: Any = jnp.float32) -> Array:
        """Return the mask of queries that are the newest tokens of their branches, [1, 1, Q, current_length].

        Args:
            query_bim: int [Q], the branch of each query. n queries of one branch are its last n tokens in order: its
                tip, or what it has accepted.
            dtype: as for `build_prefill_attention_mask`.

        Raises:
            ValueError: in batching mode; or a branch has fewer tokens than queries.
        """
        if not self.use_bim_mode:
            raise ValueError("use_bim_mode=False: use alignment_manager for batching mode")
        return self._placed(additive_mask(seen_by_newest(self.one_sequence.bim, query_bim), dtype))

    def switch_mode(self, use_bim_mode: bool, capacity: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Make all branches available in the other mode, with their KV if there is a `cache`, which is copied.

        Batching mode then has at least as many rows as there are active branches, each with one hole after the prefix.

        Args:
            use_bim_mode: the new mode.
            capacity: of the new mode; None: as before. (A row of batching mode holds one branch and its holes, the row
                of BIM mode all branches.)

        Returns:
            rows, slots: int32 [B, N], where the new cache's tokens were in the old one, for `KVCache.gathered`.

        Raises:
            ValueError: it is the mode already, a capacity is too small, or the cache lacks tokens; nothing has changed.
        """
        if bool(use_bim_mode) == self.use_bim_mode:
            raise ValueError(f"use_bim_mode: {use_bim_mode} is the mode already, allowed is {not use_bim_mode}")
        room = self.capacity if capacity is None else capacity
        check_positive_integer("capacity", room)
        num_rows, rows, alignment = self.num_branches, dict[int, int](), None
        if use_bim_mode:
            held = {branch: (self.rows[branch], self._held(branch)) for branch in self.active_branches}
            found = one_row(self.one_sequence, held)
        else:
            num_rows = max(num_rows, len(self.active_branches))
            rows = {branch: row for row, branch in enumerate(self.active_branches)}
            alignment, found = rows_of_batch(self.one_sequence, self.active_branches, num_rows, self.device)
        last = int(found[1].max(initial=-1))
        if found[1].shape[1] > room:
            raise ValueError(f"capacity: {room}, but the other mode needs {found[1].shape[1]} slots")
        if self.cache is not None:
            if self.cache.current_length <= last:
                length = self.cache.current_length
                raise ValueError(f"cache: its current_length is {length}, but a token was prepared for slot {last}")
            self.cache = self.cache.gathered(*found, room)
        self.capacity, self.use_bim_mode, self.num_branches = room, bool(use_bim_mode), num_rows
        self._alignment, self.rows = alignment, rows
        self._close()
        return found

    def _round(
        self, accept_lengths: Sequence[int] | Array, accepted_tokens: Sequence[Tokens], new: Mapping[int, Tokens]
    ) -> AlignmentState | Inputs:
        grown = accepted_by_branch(self.active_branches, accept_lengths, accepted_tokens)
        joining = {branch: self._check_new(branch, tokens) for branch, tokens in new.items()}
        counts = [len(tokens) for tokens in (*grown.values(), *joining.values())]
        if self.use_bim_mode:
            self._check_room(len(self.one_sequence) + sum(counts))
        else:
            self._check_rows(len(joining))
            self._check_room(self.alignment_manager.cache_length + max(counts, default=0))
        self._close()
        for branch, tokens in grown.items():
            self.one_sequence.extend(branch, tokens)
            self.branch_outputs[branch] += tokens
        for branch, tokens in joining.items():
            self._enter(branch, tokens)
        return self._newest(sum(counts)) if self.use_bim_mode else self._align(grown | joining)

    def _newest(self, count: int) -> Inputs:
        """Return the inputs of the last `count` tokens of the one sequence."""
        new = slice(len(self.one_sequence) - count, None)
        token_ids, position_ids = self.one_sequence.token_ids[new], self.one_sequence.position_ids[new]
        mask = self.build_decode_attention_mask(query_bim=self.one_sequence.bim[new])
        return self._placed(token_ids[None]), mask, self._placed(position_ids[None])

    def _align(self, tokens: Mapping[int, list[int]]) -> AlignmentState:
        """Return the rectangle of some branches' tokens; the rows of other branches, and of none, are padding."""
        of_rows = {self.rows[branch]: values for branch, values in tokens.items()}
        inputs = [of_rows.get(row, []) for row in self.alignment_manager.branch_ids]
        return self.alignment_manager.align_for_decode([len(values) for values in inputs], inputs)

    def _align_open(self) -> None:
        if self._alignment is not None:
            self._alignment.truncate(self._open_start)
            self._open_round = self._align(self._open) if self._open else None

    def _close(self) -> None:
        self._open, self._open_round = {}, None

    def _enter(self, branch_id: int, prompt: list[int]) -> int:
        if not self.use_bim_mode:
            self.rows[branch_id] = len(self.rows)
        self.active_branches.append(branch_id)
        self.branch_outputs[branch_id] = list(prompt)
        return self.one_sequence.extend(branch_id, prompt)

    def _held(self, branch: int) -> np.ndarray:
        """Return bool [C], the slots of a branch's row that hold a token."""
        row = self.alignment_manager.branch_ids.index(self.rows[branch])
        return np.asarray(self.alignment_manager.attention_mask)[row]

    def _one_sequence(self, name: str, empty: int, values: np.ndarray) -> Array:
        if not self.use_bim_mode:
            raise AttributeError(f"{name}: batching mode has no one sequence, its rows are in alignment_manager")
        whole = np.full(self.capacity, empty, np.int32)
        whole[: len(values)] = values
        return self._placed(whole)

    def _check_new(self, branch_id: int, tokens: Tokens) -> list[int]:
        if branch_id < 0 or branch_id in self.branch_outputs:
            raise ValueError(f"branch_id: {branch_id}, allowed are numbers from 0 on that no branch has had")
        prompt = np.asarray(tokens, np.int32).tolist()
        if not prompt:
            raise ValueError(f"tokens: branch {branch_id} has none, allowed is at least one")
        return prompt

    def _check_room(self, needed: int) -> None:
        if needed > self.capacity:
            raise ValueError(f"capacity: {self.capacity} slots, but {needed} are needed")

    def _check_rows(self, count: int) -> None:
        if len(self.rows) + count > self.num_branches:
            raise ValueError(f"num_branches: {self.num_branches} rows, {len(self.rows)} of which were used already")

    def _placed(self, values: np.ndarray) -> Array:
        return placed(values, self.device)
