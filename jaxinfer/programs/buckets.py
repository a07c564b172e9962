"""The few shapes that steps come in, chosen from the engine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from jaxinfer.config import EngineConfig
from jaxinfer.programs.batch_layout import BatchShape

_MIN_PREFILL_TOKENS = 16
_MIN_PREFILL_ROWS = 4
_MIN_LANE_SEQUENCES = 4
# One answer has so many branches at most times: up to here lanes come in every power of two.
_FEW_LANE_SEQUENCES = 16
# Loops pay for padding in every step and need no programs of sampling: from here on they come in one more number of
# rows between any two powers of two. 40 rows take 16% less time as 48 than as 64 (CPU, 8 layers). Only with the fewest
# pages: where contexts are long, more programs are too many for a process on a CPU (see `mapped_memory`).
_MIN_ROWS_BETWEEN = 16
# Columns of page tables that no row needs cost next to nothing: steps take as long with 2,048 as with 256 (CPU, 1 to
# 256 rows). Programs do: for two widths and a draft model they are more than a process on a CPU can map.
_FEW_PAGES = 2048
# A prefill row costs the output head one row; this many tokens to a row keep that below a few percent of the step.
_TOKENS_PER_PREFILL_ROW = 16

# A shape is the same object wherever it is asked for: who looks for its program compares nothing but that.
shape_of = cache(BatchShape)


def _powers(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... below last, then last."""
    values = []
    value = first
    while value < last:
        values.append(value)
        value *= factor
    return [*values, last]


@dataclass(frozen=True)
class Buckets:
    """Shapes for steps of up to `max_num_seqs` rows and `max_num_batched_tokens` tokens.

    Steps of decodes alone have a power of two of rows, decode loops one of a few more numbers. Mixed steps have one of
    a few numbers of rows, some of them for prefill chunks, and one of a few numbers of prefill tokens. The largest of
    these is what the decode rows leave of the limit, padding included, but no less than the one below it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    pages_per_row: tuple[int, ...]

    @classmethod
    def from_config(cls, config: EngineConfig) -> Buckets:
        """The shapes of an engine."""
        return cls.from_limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
        )

    @classmethod
    def from_limits(
        cls, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int
    ) -> Buckets:
        longest = -(-max_model_len // page_size)
        # Every number of pages multiplies all shapes: one near the last is not worth that.
        pages = [few for few in _powers(min(_FEW_PAGES, longest), longest, 8) if few == longest or few <= longest // 4]
        return cls(max_num_seqs, max_num_batched_tokens, tuple(pages))

    @property
    def decode_rows(self) -> list[int]:
        return _powers(1, self.max_num_seqs, 2)

    def loop_rows(self, pages_per_row: int) -> list[int]:
        """The numbers of rows of loops with page tables of one of the widths."""
        if pages_per_row > self.pages_per_row[0]:
            return self.decode_rows
        between = {rows * 3 // 2 for rows in self.decode_rows if rows >= _MIN_ROWS_BETWEEN}
        return sorted({*self.decode_rows, *(rows for rows in between if rows < self.max_num_seqs)})

    @property
    def lane_sequences(self) -> list[int]:
        """The numbers of sequences of launches of lanes."""
        few = _powers(min(_MIN_LANE_SEQUENCES, self.max_num_seqs), min(_FEW_LANE_SEQUENCES, self.max_num_seqs), 2)
        return sorted({*few, *_powers(few[-1], self.max_num_seqs, 4)})

    @property
    def prefill_tokens(self) -> list[int]:
        return _powers(min(_MIN_PREFILL_TOKENS, self.max_num_batched_tokens), self.max_num_batched_tokens, 4)

    def _prefill_rows(self, prefill_tokens: int) -> int:
        return min(self.max_num_seqs, max(_MIN_PREFILL_ROWS, prefill_tokens // _TOKENS_PER_PREFILL_ROW))

    def _rows_of_mixed(self, prefill_tokens: int) -> list[tuple[int, int]]:
        """(decode rows, prefill rows) that mixed steps of so many prefill tokens come in, from few to many.

        The sums are the same for every number of tokens, so that few numbers of logits occur; but there are no decode
        rows beyond `max_num_seqs`.
        """
        most, of_all = self._prefill_rows(prefill_tokens), self._prefill_rows(self.max_num_batched_tokens)
        sums = _powers(2 * _MIN_PREFILL_ROWS, max(2 * _MIN_PREFILL_ROWS, self.max_num_seqs + of_all), 4)
        prefills = [(rows, min(most, rows // 2)) for rows in sums]
        return [(min(rows - prefill, self.max_num_seqs), prefill) for rows, prefill in prefills]

    @cached_property
    def _mixed(self) -> list[tuple[int, int, int]]:
        """(decode rows, prefill rows, prefill tokens) of all mixed steps, from few tokens to many, then rows."""
        *fewer, most = self.prefill_tokens
        least = fewer[-1] if fewer else most
        found = [(*rows, tokens) for tokens in fewer for rows in self._rows_of_mixed(tokens)]
        found += [(*rows, max(least, most - rows[0])) for rows in self._rows_of_mixed(most)]
        return list(dict.fromkeys(found))

    def prefill_room(self, decode_rows: int, prefill_rows: int) -> int:
        """The most prefill tokens of a step of so many rows; 0: no step holds these."""
        return max((t for d, p, t in self._mixed if d >= decode_rows and p >= prefill_rows), default=0)

    def _mixed_shape(self, decode_rows: int, prefill_rows: int, tokens: int, pages: int) -> BatchShape:
        num_logits = min(decode_rows + prefill_rows, self.max_num_seqs)
        return shape_of(decode_rows, prefill_rows, tokens, pages, num_logits=num_logits)

    def loop_for(self, *, decode_rows: int, pages_per_row: int) -> BatchShape:
        """The smallest shape that holds a decode loop.

        Raises:
            ValueError: the loop is larger than the limits.
        """
        pages = _first(self.pages_per_row, pages_per_row, "pages_per_row")
        return shape_of(_first(self.loop_rows(pages), decode_rows, "decode_rows"), 0, 0, pages)

    def shape_for(self, *, decode_rows: int, prefill_rows: int, prefill_tokens: int, pages_per_row: int) -> BatchShape:
        """The smallest shape that holds a step.

        Raises:
            ValueError: the step is larger than the limits.
        """
        pages = _first(self.pages_per_row, pages_per_row, "pages_per_row")
        if prefill_tokens == 0:
            return shape_of(_first(self.decode_rows, decode_rows, "decode_rows"), 0, 0, pages)
        for decodes, prefills, tokens in self._mixed:
            if tokens >= prefill_tokens and decodes >= decode_rows and prefills >= prefill_rows:
                return self._mixed_shape(decodes, prefills, tokens, pages)
        raise ValueError(
            f"{decode_rows} decode rows and {prefill_tokens} prefill tokens in {prefill_rows} rows exceed the limits"
        )

    def all_shapes(self) -> list[BatchShape]:
        """Every shape that `shape_for` can return, decodes first."""
        return [
            *(shape_of(rows, 0, 0, pages) for pages in self.pages_per_row for rows in self.decode_rows),
            *(self._mixed_shape(*mixed, pages) for pages in self.pages_per_row for mixed in self._mixed),
        ]

    def all_lanes(self, lane_pages: int) -> list[BatchShape]:
        """Every shape of a launch of lanes that writes up to `lane_pages` pages of each sequence, from few to many."""
        return [
            BatchShape.of_lanes(count, pages, lane_pages)
            for pages in self.pages_per_row
            for count in self.lane_sequences
        ]

    def all_loops(self) -> list[BatchShape]:
        """Every shape that `loop_for` can return."""
        return [shape_of(rows, 0, 0, pages) for pages in self.pages_per_row for rows in self.loop_rows(pages)]


def lane_pages_for(num_tokens: int, page_size: int) -> int:
    """The most pages that hold a sequence's latest two tokens and `num_tokens` behind them."""
    return num_tokens // page_size + 2


def _first(buckets: Sequence[int], size: int, name: str) -> int:
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{name}={size} exceeds the largest bucket, {buckets[-1]}")
