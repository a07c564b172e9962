"""The few shapes that steps come in, chosen from the engine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from jaxinfer.config import EngineConfig
from jaxinfer.programs.batch_layout import BatchShape

_MIN_PREFILL_TOKENS = 16
_MIN_PREFILL_ROWS = 4
_MIN_DECODE_ROWS = 4  # beside prompts
# From the first number on, prompt tokens have a bucket at every power of two, and up to the second number one more
# between any two of them. Steps of one prompt each (log-normal, median 250) beside 0 to 200 decodes then compute 1.3
# times what they need.
_FIRST_POWER, _LAST_BETWEEN = 64, 2048
_MIN_LANE_SEQUENCES = 4
# Most answers have no more branches: up to here there is a bucket of lanes for every power of two.
_FEW_LANE_SEQUENCES = 16
# From here on decode loops have one more bucket of rows between any two powers of two: 40 rows take 16% less time
# padded to 48 than to 64 (CPU, 8 layers). Only with the narrowest page tables: where contexts are long, a process on a
# CPU cannot map more programs (see `mapped_memory`).
_MIN_ROWS_BETWEEN = 32
# Unused columns of page tables cost next to nothing: steps take as long with 2,048 as with 256 (CPU, 1 to 256 rows).
# Programs are not free: two widths and a draft model make more of them than a process on a CPU can map.
_FEW_PAGES = 2048
# A prefill row costs the output head one row; this many tokens to a row keep that below a few percent of the step.
_TOKENS_PER_PREFILL_ROW = 16

# Cached: a shape is the same object wherever it is asked for, so that looking up its program compares identities only.
shape_of = cache(BatchShape)


def _powers(first: int, last: int, factor: int) -> list[int]:
    """Return first, first * factor, ... below last, then last."""
    values = []
    value = first
    while value < last:
        values.append(value)
        value *= factor
    return [*values, last]


@dataclass(frozen=True)
class Buckets:
    """Shapes for steps of up to `max_num_seqs` rows and `max_num_batched_tokens` tokens.

    Decode loops have a power of two of rows, or one of a few more numbers. Steps, which have prefill chunks, have one
    of a few numbers of decode rows and one of about a dozen numbers of prefill tokens; the largest of these is what the
    decode rows leave of the limit, padding included, but no less than the one below it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    pages_per_row: tuple[int, ...]

    @classmethod
    def from_config(cls, config: EngineConfig) -> Buckets:
        """Return the shapes of an engine."""
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
        """Return the bucket sizes of decode-loop rows for one width of page tables."""
        if pages_per_row > self.pages_per_row[0]:
            return self.decode_rows
        between = {rows * 3 // 2 for rows in self.decode_rows if rows >= _MIN_ROWS_BETWEEN}
        return sorted({*self.decode_rows, *(rows for rows in between if rows < self.max_num_seqs)})

    @property
    def lane_sequences(self) -> list[int]:
        """Bucket sizes of sequences in launches of lanes."""
        few = _powers(min(_MIN_LANE_SEQUENCES, self.max_num_seqs), min(_FEW_LANE_SEQUENCES, self.max_num_seqs), 2)
        return sorted({*few, *_powers(few[-1], self.max_num_seqs, 4)})

    @property
    def prefill_tokens(self) -> list[int]:
        """Bucket sizes of prefill tokens of steps; of the largest one, decode rows take their part."""
        last = self.max_num_batched_tokens
        powers = _powers(_FIRST_POWER, max(last, _FIRST_POWER), 2)
        between = {count * 3 // 2 for count in powers if _FIRST_POWER < count < _LAST_BETWEEN}
        return [*sorted(count for count in {_MIN_PREFILL_TOKENS, *powers, *between} if count < last), last]

    def _prefill_rows(self, prefill_tokens: int) -> int:
        return min(self.max_num_seqs, max(_MIN_PREFILL_ROWS, prefill_tokens // _TOKENS_PER_PREFILL_ROW))

    def _rows_beside(self, prefill_tokens: int) -> list[int]:
        """Return the bucket sizes of decode rows of steps with so many prefill tokens.

        The more tokens there are, the less padding rows cost.
        """
        most = self.max_num_seqs
        if prefill_tokens == self.max_num_batched_tokens:
            fewer = [_MIN_DECODE_ROWS]
        elif prefill_tokens <= most // 4:
            fewer = [prefill_tokens // 4]
        elif prefill_tokens <= 3 * most:
            fewer = [most // 8, most // 2]
        else:
            fewer = [most // 8]
        return sorted({min(max(rows, _MIN_DECODE_ROWS), most) for rows in (*fewer, most)})

    @cached_property
    def _mixed(self) -> list[tuple[int, int, int]]:
        """(decode rows, prefill rows, prefill tokens) of all steps, from few tokens to many."""
        *fewer, most = self.prefill_tokens
        least = fewer[-1] if fewer else most
        found = [(rows, self._prefill_rows(tokens), tokens) for tokens in fewer for rows in self._rows_beside(tokens)]
        prefill_rows = self._prefill_rows(most)
        found += [(rows, prefill_rows, max(least, most - rows)) for rows in self._rows_beside(most)]
        return sorted(dict.fromkeys(found), key=lambda mixed: (mixed[0] + mixed[2], mixed))

    @property
    def hidden_sizes(self) -> list[int]:
        """Padded numbers of hidden states that steps leave for log probabilities: of small steps, and of all."""
        counts = [decodes + tokens for decodes, _, tokens in self._mixed]
        return sorted({_power_above(max(self.max_num_seqs, min(counts))), _power_above(max(counts))})

    def prefill_room(self, decode_rows: int, prefill_rows: int) -> int:
        """Return the most prefill tokens of a step with so many rows; 0: no step holds them."""
        return max((t for d, p, t in self._mixed if d >= decode_rows and p >= prefill_rows), default=0)

    def _mixed_shape(self, decode_rows: int, prefill_rows: int, tokens: int, pages: int) -> BatchShape:
        num_logits = min(decode_rows + prefill_rows, self.max_num_seqs)
        return shape_of(decode_rows, prefill_rows, tokens, pages, num_logits=num_logits)

    def loop_for(self, *, decode_rows: int, pages_per_row: int) -> BatchShape:
        """Return the smallest shape that holds a decode loop.

        Raises:
            ValueError: the loop is larger than the limits.
        """
        pages = _first(self.pages_per_row, pages_per_row, "pages_per_row")
        return shape_of(_first(self.loop_rows(pages), decode_rows, "decode_rows"), 0, 0, pages)

    def shape_for(self, *, decode_rows: int, prefill_rows: int, prefill_tokens: int, pages_per_row: int) -> BatchShape:
        """Return the smallest shape that holds a step with prefill chunks.

        Raises:
            ValueError: the step is larger than the limits.
        """
        pages = _first(self.pages_per_row, pages_per_row, "pages_per_row")
        for decodes, prefills, tokens in self._mixed:
            if tokens >= prefill_tokens and decodes >= decode_rows and prefills >= prefill_rows:
                return self._mixed_shape(decodes, prefills, tokens, pages)
        raise ValueError(
            f"{decode_rows} decode rows and {prefill_tokens} prefill tokens in {prefill_rows} rows exceed the limits"
        )

    def all_steps(self) -> list[BatchShape]:
        """Return every shape that `shape_for` can return."""
        return [self._mixed_shape(*mixed, pages) for pages in self.pages_per_row for mixed in self._mixed]

    def all_chunks(self) -> list[BatchShape]:
        """Return every shape that `shape_for` can return where there are no decode rows."""
        ways = [(prefills, tokens) for _, prefills, tokens in self._mixed]
        return list(
            dict.fromkeys(
                self.shape_for(decode_rows=0, prefill_rows=prefills, prefill_tokens=tokens, pages_per_row=pages)
                for pages in self.pages_per_row
                for prefills, tokens in ways
            )
        )

    def all_lanes(self, lane_pages: int) -> list[BatchShape]:
        """Return every shape of a launch of lanes that writes up to `lane_pages` pages of each sequence, ascending."""
        return [
            BatchShape.of_lanes(count, pages, lane_pages)
            for pages in self.pages_per_row
            for count in self.lane_sequences
        ]

    def all_loops(self) -> list[BatchShape]:
        """Return every shape that `loop_for` can return."""
        return [shape_of(rows, 0, 0, pages) for pages in self.pages_per_row for rows in self.loop_rows(pages)]


def _power_above(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def lane_pages_for(num_tokens: int, page_size: int) -> int:
    """Return the most pages that a sequence's latest two tokens and `num_tokens` after them may take."""
    return num_tokens // page_size + 2


def _first(buckets: Sequence[int], size: int, name: str) -> int:
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{name}={size} exceeds the largest bucket, {buckets[-1]}")
