"""Input of one device step: tokens, what they see and how to sample. It crosses to the device as one int32 buffer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.metadata import AttentionMetadata
from jaxinfer.limits import MAX_ENDING_TOKEN_IDS
from jaxinfer.programs.packing import Extent, Packed, unpacked
from jaxinfer.sampling.sampler import SamplingBatch


@dataclass(frozen=True)
class BatchShape:
    """Static sizes of a step; a program is compiled for each of them.

    `decode_rows` rows of `decode_width` tokens, then `prefill_rows` rows that share `prefill_tokens` tokens. Tails have
    up to 32 * `tail_words` tokens. `num_logits` tokens get logits and are sampled: by default one for each row.

    With `lane_pages` the rows are lanes: each of the prefill tokens is the latest of a sequence, and sequences whose
    lanes start with the same pages may share one row, which reads these once. `of_lanes` makes such a shape.
    """

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    pages_per_row: int
    decode_width: int = 1
    tail_words: int = 0
    num_logits: int = 0  # 0: one for each row, and the attribute is set to that number
    lane_pages: int = 0  # pages that a launch may write of each sequence of a lane
    block_size: int = 0  # tokens of a decode row where blocks are denoised: its block, or a window around it

    def __post_init__(self) -> None:
        if self.num_logits == 0:
            object.__setattr__(self, "num_logits", self.num_rows)

    @classmethod
    def of_lanes(cls, sequences: int, pages_per_row: int, lane_pages: int) -> BatchShape:
        """Return the shape of decode launches of so many sequences, in as many lanes or fewer."""
        return cls(0, sequences, sequences, pages_per_row, lane_pages=lane_pages)

    @property
    def num_tokens(self) -> int:
        return self.decode_rows * self.decode_width + self.prefill_tokens

    @property
    def num_rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    def holds(self, other: BatchShape) -> bool:
        """Whether a batch of the other shape fits into this one, so that all that differs is padding.

        A launch with chunks of prompts is no launch without: a program may run fewer rounds in it.
        """
        return (
            self.decode_width == other.decode_width
            and self.tail_words == other.tail_words
            and self.lane_pages == other.lane_pages
            and self.block_size == other.block_size
            and (self.prefill_tokens > 0) == (other.prefill_tokens > 0)
            and self.decode_rows >= other.decode_rows
            and self.prefill_rows >= other.prefill_rows
            and self.prefill_tokens >= other.prefill_tokens
            and self.pages_per_row >= other.pages_per_row
            and self.num_logits >= other.num_logits
        )

    def describe(self) -> str:
        """Return the shape in words, for logs and progress lines."""
        if self.lane_pages:
            return f"{self.num_tokens} sequences in lanes of up to {self.pages_per_row} pages"
        words = [f"{self.decode_rows} decodes"] if self.decode_rows else []
        if words and self.decode_width > 1:
            words[0] += f" of {self.decode_width} tokens"
        if words and self.block_size:
            words[0] = f"{self.decode_rows} blocks of {self.block_size} tokens"
        if self.prefill_tokens:
            words.append(f"{self.prefill_tokens} prompt tokens in {self.prefill_rows} rows")
        parts = [" and ".join(words), f"{self.pages_per_row} pages a row"]
        if self.tail_words:
            parts.append(f"{self.tail_words} words of tail bits")
        if self.num_logits != self.num_rows:
            parts.append(f"{self.num_logits} logits")
        return ", ".join(parts)

    @property
    def is_branched(self) -> bool:
        """Whether the host gives the branch that owns each page: in lanes, with tails, or with wide decode rows."""
        return self.lane_pages > 0 or self.tail_words > 0 or self.decode_width > 1

    def layout(self) -> dict[str, Extent]:
        """Return name -> (shape, dtype) of every host array of the step, in the order of the packed buffer."""
        t, r, p, q = self.num_tokens, self.num_rows, self.pages_per_row, self.num_logits
        i, u, f = np.int32, np.uint32, np.float32
        return {
            "token_ids": ((t,), i), "positions": ((t,), i), "lengths": ((t,), i), "slot_mapping": ((t,), i),
            "row": ((t,), i), "limit": ((t,), i), "branch": ((t,), i), "tail_bits": ((t, self.tail_words), u),
            "page_table": ((r, p), i), "page_branch": ((r, p if self.is_branched else 0), i), "kv_len": ((r,), i),
            "trunk_len": ((r,), i), "tail_start": ((r,), i), "query_start_loc": ((r + 1,), i), "row_seat": ((r,), i),
            "capacity": ((r,), i), "max_drafts": ((r,), i), "drafter_start": ((r,), i), "logits_index": ((q,), i),
            "block_tokens": ((self.decode_rows if self.block_size else 0, self.block_size), i),
            "block_start": ((r if self.block_size else 0,), i), "block_round": ((r if self.block_size else 0,), i),
            "wants_logprobs": ((), i), "wants_list": ((q,), i),
            "temperature": ((q,), f), "top_k": ((q,), i), "top_p": ((q,), f), "min_p": ((q,), f),
            "request_key": ((q, 2), u), "sample_position": ((q,), i),
            "seat": ((q,), i), "ending_token_ids": ((q, MAX_ENDING_TOKEN_IDS), i), "max_len": ((q,), i),
            "first_page": ((q if self.lane_pages else 0,), i), "lane_page": ((q, self.lane_pages), i),
            "num_steps": ((r,), i), "drafter_follows": ((), i),
        }  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Samples:
    """Sampling of each of Q rows of logits, and where its token goes."""

    sampling: SamplingBatch  # [Q]; a sample_position of -1: the row is idle, and no token lands
    seat: jax.Array  # int32 [Q], where the token is kept for the next step; out of range: nowhere
    ending_token_ids: jax.Array  # int32 [Q, MAX_ENDING_TOKEN_IDS], tokens that end the sequence; -1: none
    max_len: jax.Array  # int32 [Q], tokens of the sequence at which it ends


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch(AttentionMetadata):
    """A step's tokens on the device. T tokens, R rows, Q wanted logits; see `AttentionMetadata` for the rest."""

    token_ids: jax.Array  # int32 [T]
    positions: jax.Array  # int32 [T], depth of the token in its own branch
    lengths: jax.Array  # int32 [T], the sequence's length when the token was first computed (dynamic rotary types)
    logits_index: jax.Array  # int32 [Q], the tokens whose logits are wanted
    # For each row, or in a launch of lanes, for each of its sequences, which are as many. A decode row of one token, or
    # a sequence of a lane, is completed from its seat (`read_seats`); -1: none.
    row_seat: jax.Array  # int32 [R]
    capacity: jax.Array  # int32 [R], positions that its pages have room for; columns after them are stale
    max_drafts: jax.Array  # int32 [R], tokens that may be drafted one after the other in a round
    drafter_start: jax.Array  # int32 [R], for rows in any launch: the first token of each that a drafter sees
    # For launches that denoise blocks of B tokens. For decode rows that enter their seats: the first block, masks
    # included, and the position where it starts; -1 for rows that are seated already. Where the host knows the blocks
    # of all rows: the tokens of a window of each decode row, and the rounds that each row's sequence has had.
    block_tokens: jax.Array  # int32 [D, B]
    block_start: jax.Array  # int32 [R]
    block_round: jax.Array  # int32 [R]
    wants_logprobs: jax.Array  # int32 [], 1: a row wants log probabilities of drawn tokens
    wants_list: jax.Array  # int32 [Q], 1: this one wants those of the most likely tokens too
    # For launches of lanes (else L is 0): the index in its lane of each sequence's pages, from its `first_page`th on.
    first_page: jax.Array  # int32 [Q]
    lane_page: jax.Array  # int32 [Q, L]
    samples: Samples  # [Q]
    num_steps: jax.Array  # int32 [R], like `row_seat`: steps of a decode loop, or rounds, that each takes part in
    drafter_follows: jax.Array  # int32 [], 1: a drafter, if there is one, computes the step's tokens as well

    @property
    def is_of_lanes(self) -> bool:
        return self.lane_page.shape[1] > 0

    @property
    def num_sequences(self) -> int:
        """Number of seated sequences, as rows or in lanes, idle ones included; their tokens precede all others."""
        return self.lane_page.shape[0] if self.is_of_lanes else self.decode_rows

    def places(self, position: jax.Array, *, page_size: int) -> tuple[jax.Array, jax.Array]:
        """Return the page and the lane index, int32 [S, N] each, of positions [S, N] of the seated sequences."""
        number = position // page_size
        row = jnp.arange(position.shape[0])
        if self.is_of_lanes:
            number = jnp.take_along_axis(self.lane_page, number - self.first_page[:, None], axis=1, mode="clip")
            row = self.row[: position.shape[0]]
        page = self.page_table.at[row[:, None], number].get(mode="clip")
        return page, number * page_size + position % page_size


class PackedBatch(Packed):
    """Host arrays of one step."""

    def __init__(self, shape: BatchShape, buffer: np.ndarray | None = None) -> None:
        super().__init__(shape, buffer)
        self.shape = shape

    def copy(self) -> PackedBatch:
        """Return a batch with a buffer of its own."""
        return PackedBatch(self.shape, self.buffer.copy())


def unpack(buffer: jax.Array, shape: BatchShape) -> StepBatch:
    """Return the batch in a buffer of `PackedBatch`, inside a jitted function."""
    values = unpacked(buffer, shape)
    sampling = SamplingBatch(**{f.name: values.pop(f.name) for f in fields(SamplingBatch)})
    samples = Samples(sampling, **{f.name: values.pop(f.name) for f in fields(Samples) if f.name != "sampling"})
    values["first"] = jnp.zeros(0, jnp.int32)
    if not shape.is_branched:
        values["page_branch"] = jnp.full_like(values["page_table"], -1)
    return StepBatch(
        samples=samples, decode_rows=shape.decode_rows, decode_width=shape.decode_width, is_branched=shape.is_branched,
        **values,
    )  # fmt: skip


def idle_batch(shape: BatchShape, *, num_slots: int, num_seats: int) -> PackedBatch:
    """Return a step of padding alone: it writes nothing, sees nothing, and no sample of it lands."""
    packed = PackedBatch(shape)
    packed["slot_mapping"][:] = num_slots + np.arange(shape.num_tokens)
    packed["row"][: shape.decode_rows * shape.decode_width] = np.repeat(
        np.arange(shape.decode_rows), shape.decode_width
    )
    for name in ("limit", "branch", "page_branch", "row_seat", "ending_token_ids", "block_tokens", "block_start"):
        packed[name][...] = -1
    packed["query_start_loc"][:] = np.minimum(np.arange(shape.num_rows + 1), shape.decode_rows) * shape.decode_width
    packed["top_p"][:] = 1.0
    packed["seat"][:] = num_seats
    packed["num_steps"][:] = 1
    return packed
