"""Tuning of the kernel: static sizes, and their choice for a shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

# Rows of one warpgroup's matrix product, which Hopper fixes.
QUERY_ROWS = 64
# Limit of a thread block on Hopper, less what the compiler reserves for barriers and reductions.
SHARED_MEMORY_BYTES = 227 * 1024 - 2048
MAX_STAGES = 4
MAX_SPLITS = 32
# Columns of a result that are stored at a time if there is no room for all of them.
STORED_COLUMNS = 64
# With fewer tiles than this in a split, its fixed cost is no longer small.
MIN_TILES_PER_SPLIT = 4


@dataclass(frozen=True)
class Tuning:
    """Static options of one launch of the kernel.

    Attributes:
        consumers: warpgroups that share every KV tile, with 64 stacked query rows each.
        tokens: most query tokens of one warpgroup; 64 rows may have room for fewer.
        tile: KV tokens that are loaded and multiplied at a time, 64 or 128.
        stages: tiles in flight, the one in use included.
        splits: parts of one query block's pages that are computed separately (split-KV); their results are merged.
        programs: most programs; they share the items, which are blocks, splits and heads.
        weights_in_registers: whether the second product reads the softmax weights from registers and accumulates its
            result in place. That is the faster form; GPU interpretation supports only the other one.
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
    first_token: int  # number, within the step, of the launch's first token
    tail_words: int  # aligned, 0 without tails
    scale: float  # factor of the scores; without a cap, in units of log2
    cap: (
        float | None
    )  # bound of the scores, in units of log2; `scale` is then that of the exponent 2x of base-2 tanh(x)
    dtype: jnp.dtype
    kv_heads: int
    items: int  # blocks times splits times KV heads
    has_first: bool  # whether queries have lower bounds
    has_sinks: bool

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
        """Dtype of the kernel's output; float32 for splits, whose results are merged later."""
        return jnp.dtype(jnp.float32) if self.split else self.dtype


def stores_in_columns(tuning: Tuning, head_dim: int) -> bool:
    """Whether results are stored through a buffer of a few columns: with splits, because a float32 buffer for all
    columns would cost a stage of tiles; with long heads, because all addresses would take registers from the result.
    (With a few columns at a time in the queries' buffer, every second 64 columns were wrong on an H200.)"""
    return tuning.splits > 1 or head_dim > 128


def shared_memory_bytes(tuning: Tuning, head_dim: int, tail_words: int, has_first: bool = False) -> int:
    """Shared memory of one program in 16-bit precision, with `tail_words` words of tail bits per token, and with or
    without lower bounds."""
    queries = 2 * QUERY_ROWS * head_dim * 2
    weights = 0 if tuning.weights_in_registers else QUERY_ROWS * tuning.tile * 2
    columns = 0
    if stores_in_columns(tuning, head_dim):
        columns = QUERY_ROWS * STORED_COLUMNS * (4 if tuning.splits > 1 else 2)
    integers = QUERY_ROWS * 4 * (4 + has_first + aligned_tail_words(tail_words))
    pages = tuning.stages * 2 * tuning.tile * head_dim * 2
    return pages + tuning.consumers * (queries + weights + columns + integers)


def aligned_tail_words(tail_words: int) -> int:
    """Words that hold a token's tail bits counted from the start of a page, then zeros; 0 without a tail."""
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
    has_first: bool = False,
    weights_in_registers: bool = True,
) -> Tuning:
    """Choose sizes for rows of up to `tokens_per_row` query tokens over lanes of up to `tokens_of_lane` tokens.

    Long rows are compute-bound: two warpgroups share each tile. Short rows are memory-bound: tiles are small, many are
    in flight, and there are enough splits that every core has a program.

    Raises:
        ValueError: no choice of sizes fits the shared memory.
    """
    # With small heads, the softmax of small tiles would be the bottleneck of short rows.
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
            if shared_memory_bytes(staged, head_dim, tail_words, has_first) <= SHARED_MEMORY_BYTES:
                return staged
    raise ValueError(f"head_dim {head_dim} with {tail_words} words of tail bits does not fit the shared memory")
