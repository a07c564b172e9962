"""Incremental detokenisation of one request; text that may become a stop string is held back."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of a request's output so far.

    Attributes:
        text: complete characters only, cut where a stop string begins (or ends, if it is to be included).
        num_tokens: number of tokens taken so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._stream = tokenizer.stream(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        self._stop = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self._searchable_from = 0  # stop strings count only in text that came after min_tokens
        self._stopped = False
        self.text = ""

    def append(self, token_id: int) -> str | None:
        """Take one token; returns the stop string that it completes, if any, where the text is cut and ends."""
        self.num_tokens += 1
        piece = self._stream.append(token_id)
        return self._take(piece)

    def _take(self, piece: str) -> str | None:
        begin = len(self.text)
        self.text += piece
        if self.num_tokens <= self._min_tokens:
            self._searchable_from = len(self.text)
            return None
        if not self._stop or not piece:
            return None
        return self._cut_at_stop(begin)

    def _cut_at_stop(self, begin: int) -> str | None:
        """Cut at the stop string that ends first in the text from `begin` on, the longest if several end there."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self.text.find(stop, max(self._searchable_from, begin - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        end, start, stop = best
        self._stopped = True
        self.text = self.text[: end if self._include_stop else start]
        return stop

    def finish(self) -> str | None:
        """End the text: incomplete characters become U+FFFD. Returns the stop string that they complete, if any.

        After a stop string, and when called again, it is a no-op.
        """
        return None if self._stopped else self._take(self._stream.finish())

    def shown(self, start: int) -> str:
        """Return the text from character `start` on, without an end that may be the start of a stop string."""
        end = len(self.text)
        if self._stop:
            end = max(start, end - self._held_back())
        return self.text[start:end]

    def _held_back(self) -> int:
        """Return the length of the longest end of the searchable text that is the start of a stop string."""
        longest = 0
        searchable = len(self.text) - self._searchable_from
        for stop in self._stop:
            most = min(len(stop) - 1, searchable)
            tail = self.text[len(self.text) - most :]
            place = tail.find(stop[0])
            while place >= 0 and not stop.startswith(tail[place:]):
                place = tail.find(stop[0], place + 1)
            if place >= 0:
                longest = max(longest, most - place)
        return longest
