"""How the kernel cuts its work: static sizes, and the choice of them for a shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

# Rows of one warpgroup's matrix product, which Hopper fixes.
QUERY_ROWS = 64
# What a Hopper block may ask for, less what the compiler keeps for barriers and reductions.
SHARED_MEMORY_BYTES = 227 * 1024 - 2048
MAX_STAGES = 4
MAX_SPLITS = 32
# Columns of a result that are stored at a time, where it has no room as a whole.
STORED_COLUMNS = 64
# Fewer tiles than this in a split, and its fixed cost is no longer small.
MIN_TILES_PER_SPLIT = 4


@dataclass(frozen=True)
class Tuning:
    """Static options of one launch of the kernel.

    Attributes:
        consumers: warpgroups that share every KV tile, with 64 stacked query rows each.
        tokens: the most query tokens of one warpgroup; 64 rows may have room for fewer.
        tile: KV tokens that are loaded and multiplied at a time, 64 or 128.
        stages: tiles in flight, the one in use included.
        splits: parts of the pages of one query block that are computed apart; their results are merged.
        programs: the most programs; they go through blocks, splits and heads.
        weights_in_registers: whether the softmax weights go to the second product from registers and its result
            accumulates in place. That is the fast form; GPU interpretation knows only the other one.
    """

    consumers: int = 1
    tokens: int = QUERY_ROWS
    tile: int = 64
    stages: int = 3
    splits: int = 1
    programs: int = 132
    weights_in_registers: bool = True

    def __post_init__(self) -> None:
        if self.consumers not in (1, 2):
            raise ValueError(f"consumers must be 1 or 2, got {self.consumers}")
        if not 1 <= self.tokens <= QUERY_ROWS:
            raise ValueError(f"tokens must be between 1 and {QUERY_ROWS}, got {self.tokens}")
        if self.tile not in (64, 128):
            raise ValueError(f"tile must be 64 or 128, got {self.tile}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if not 1 <= self.splits <= MAX_SPLITS:
            raise ValueError(f"splits must be between 1 and {MAX_SPLITS}, got {self.splits}")

        if self.programs < 1:
            raise ValueError(f"programs must be at least 1, got {self.programs}")

    def tokens_per_consumer(self, group: int) -> int:
        """Query tokens of one warpgroup, each with `group` heads."""
        return min(self.tokens, QUERY_ROWS // group)

    def tokens_per_block(self, group: int) -> int:
        """Query tokens of one program."""
        return self.consumers * self.tokens_per_consumer(group)


@dataclass(frozen=True)
class KernelLaunch:
    """Static sizes of one launch of the kernel."""

    tuning: Tuning
    page_size: int
    head_dim: int
    group: int  # query heads of one KV head
    first_token: int  # of the launch's tokens among the step's
    tail_words: int  # aligned, 0 without tails
    scale: float  # of the scores, in units of log2
    dtype: jnp.dtype
    kv_heads: int
    items: int  # blocks times splits times KV heads

    @property
    def programs(self) -> int:
        return min(self.tuning.programs, self.items)

    @property
    def pages_per_tile(self) -> int:
        return self.tuning.tile // self.page_size

    @property
    def split(self) -> bool:
        return self.tuning.splits > 1

    @property
    def stored_dtype(self) -> jnp.dtype:
        """Of what leaves the kernel; the results of splits are still to be merged."""
        return jnp.dtype(jnp.float32) if self.split else self.dtype


def stores_in_columns(tuning: Tuning, head_dim: int) -> bool:
    """Whether results leave through a buffer of a few columns: of splits, because one for all of them in float32 would
    cost a stage of tiles, and of long heads, because the addresses of all would take registers from the result. (Stored
    a few columns at a time into the place of the queries, every second 64 were wrong on an H200.)"""
    return tuning.splits > 1 or head_dim > 128


def shared_memory_bytes(tuning: Tuning, head_dim: int, tail_words: int) -> int:
    """Shared memory of one program in 16-bit precision, with `tail_words` words of tail bits per token."""
    queries = 2 * QUERY_ROWS * head_dim * 2
    weights = 0 if tuning.weights_in_registers else QUERY_ROWS * tuning.tile * 2
    columns = 0
    if stores_in_columns(tuning, head_dim):
        columns = QUERY_ROWS * STORED_COLUMNS * (4 if tuning.splits > 1 else 2)
    integers = QUERY_ROWS * 4 * (4 + aligned_tail_words(tail_words))
    pages = tuning.stages * 2 * tuning.tile * head_dim * 2
    return pages + tuning.consumers * (queries + weights + columns + integers)


def aligned_tail_words(tail_words: int) -> int:
    """Words that hold a token's tail bits counted from the start of a page, and zeros behind them; 0 without a tail."""
    return tail_words + 3 if tail_words else 0


def choose_tuning(
    *,
    tokens_per_row: int,
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    tokens_of_lane: int,
    tail_words: int,
    num_cores: int,
    weights_in_registers: bool = True,
) -> Tuning:
    """Sizes for rows of up to `tokens_per_row` query tokens over lanes of up to `tokens_of_lane` tokens.

    Long rows are bound by arithmetic: two warpgroups share each tile. Short rows are bound by memory: small tiles, many
    in flight, and so many splits that every core has a program.

    Raises:
        ValueError: no choice of sizes fits the shared memory.
    """
    # Short rows of few bytes would be bound by the softmax of small tiles.
    tile = 128 if head_dim == 64 else 64
    form = Tuning(tile=tile, programs=num_cores, weights_in_registers=weights_in_registers)
    many = tokens_per_row * group > QUERY_ROWS
    candidates = [replace(form, consumers=2, tile=size) for size in (128, 64)] if many else []
    for candidate in (*candidates, form):
        candidate = replace(candidate, tokens=min(-(-tokens_per_row // candidate.consumers), QUERY_ROWS))
        blocks = rows * -(-tokens_per_row // candidate.tokens_per_block(group))
        tiles = -(-tokens_of_lane // candidate.tile)
        splits = min(num_cores // (blocks * kv_heads), tiles // MIN_TILES_PER_SPLIT, MAX_SPLITS)
        candidate = replace(candidate, splits=max(1, splits))
        for stages in range(MAX_STAGES, 1, -1):
            staged = replace(candidate, stages=stages)
            if shared_memory_bytes(staged, head_dim, tail_words) <= SHARED_MEMORY_BYTES:
                return staged
    raise ValueError(f"head_dim {head_dim} with {tail_words} words of tail bits does not fit the shared memory")
