"""The few shapes that steps come in, chosen from the engine's limits."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.engine.step_batch import BatchShape

_MIN_PREFILL_TOKENS = 16
_MIN_PREFILL_ROWS = 4
# A prefill row costs the output head one row; this many tokens to a row keep that below a few percent of the step.
_TOKENS_PER_PREFILL_ROW = 16


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

    Steps of decodes alone have one of `decode_rows` rows. Mixed steps have one of the coarser `mixed_decode_rows` and
    one of `prefill_tokens`, whose number of prefill rows follows from it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    pages_per_row: tuple[int, ...]

    @classmethod
    def from_limits(
        cls, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int
    ) -> Buckets:
        longest = -(-max_model_len // page_size)
        return cls(max_num_seqs, max_num_batched_tokens, tuple(_powers(min(256, longest), longest, 8)))

    @property
    def decode_rows(self) -> list[int]:
        return _powers(1, self.max_num_seqs, 2)

    @property
    def mixed_decode_rows(self) -> list[int]:
        return [0, *_powers(min(8, self.max_num_seqs), self.max_num_seqs, 4)]

    @property
    def prefill_tokens(self) -> list[int]:
        return _powers(min(_MIN_PREFILL_TOKENS, self.max_num_batched_tokens), self.max_num_batched_tokens, 4)

    def prefill_rows(self, prefill_tokens: int) -> int:
        """Rows that a step of this many prefill tokens has room for."""
        return min(self.max_num_seqs, max(_MIN_PREFILL_ROWS, prefill_tokens // _TOKENS_PER_PREFILL_ROW))

    @property
    def max_prefill_rows(self) -> int:
        return self.prefill_rows(self.prefill_tokens[-1])

    def shape_for(
        self, *, decode_rows: int, prefill_rows: int, prefill_tokens: int, pages_per_row: int, num_biases: int = 0
    ) -> BatchShape:
        """The smallest shape that holds a step.

        Raises:
            ValueError: the step is larger than the limits.
        """
        pages = _first(self.pages_per_row, pages_per_row, "pages_per_row")
        biases = 0 if num_biases == 0 else _first(_powers(64, max(64, num_biases), 8), num_biases, "num_biases")
        if prefill_tokens == 0:
            return BatchShape(_first(self.decode_rows, decode_rows, "decode_rows"), 0, 0, pages, num_biases=biases)
        tokens = next(
            (t for t in self.prefill_tokens if t >= prefill_tokens and self.prefill_rows(t) >= prefill_rows), 0
        )
        if not tokens:
            raise ValueError(f"{prefill_tokens} prefill tokens in {prefill_rows} rows exceed {self.prefill_tokens[-1]}")
        decodes = _first(self.mixed_decode_rows, decode_rows, "decode_rows")
        return BatchShape(decodes, self.prefill_rows(tokens), tokens, pages, num_biases=biases)


def _first(buckets, size: int, name: str) -> int:
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{name}={size} exceeds the largest bucket, {buckets[-1]}")
