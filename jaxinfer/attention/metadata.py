"""The integers that tell attention which row each token belongs to and what it may see."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """A step's tokens, in two groups of rows.

    The first `decode_rows` rows hold `decode_width` tokens each (a decode token; or a row's branches and draft nodes,
    padded), at tokens [r * decode_width, (r + 1) * decode_width). The other rows hold prefill chunks of any length,
    packed one after the other. T tokens, R rows, P pages per row, W words of tail bits (0: no tails in this step).

    Padding tokens have slot num_pages * page_size (dropped) and limit -1 (see nothing); padding rows have kv_len 0.
    """

    slot_mapping: jax.Array  # int32 [T], the slot that the token's K and V are written to
    row: jax.Array  # int32 [T]
    limit: jax.Array  # int32 [T], the highest lane index that the token may see
    first: jax.Array  # int32 [T], the lowest lane index below the tail that it may see; int32 [0]: all may see index 0
    branch: jax.Array  # int32 [T], -1 for tokens of the trunk
    tail_bits: jax.Array  # uint32 [T, W], bit i: the token sees lane index tail_start + i
    page_table: jax.Array  # int32 [R, P]
    page_branch: jax.Array  # int32 [R, P], the branch that owns the page (read from trunk_len on)
    kv_len: jax.Array  # int32 [R], lane indices in use, this step's tokens included
    trunk_len: jax.Array  # int32 [R]
    tail_start: jax.Array  # int32 [R]
    query_start_loc: jax.Array  # int32 [R + 1], the first token of each row
    decode_rows: int = field(metadata={"static": True})
    decode_width: int = field(metadata={"static": True})
    # Whether tokens or pages may belong to branches; if not, all branch numbers are -1.
    is_branched: bool = field(default=True, kw_only=True, metadata={"static": True})
    # int32 [R, 32 * W], position of the token at each index of the tail; None where no layer has a window.
    tail_position: jax.Array | None = field(default=None, kw_only=True)
