"""What every answer and chunk of one request has around its choices: id, model, time and usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxinfer.outputs import RequestOutput
from jaxinfer.server.errors import ApiError
from jaxinfer.server.events import DONE, event
from jaxinfer.server.protocol.common import StreamOptions


class Envelope:
    """The frame of one request's answers, and the tokens that it has used.

    Args:
        answer_id: the same in all chunks.
        model: the served model's name.
        fingerprint: of the engine's configuration.
    """

    def __init__(self, answer_id: str, model: str, fingerprint: str) -> None:
        self.answer_id, self._model, self._fingerprint = answer_id, model, fingerprint
        self._created = int(time.time())
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens of each prompt, and those that were cached
        self._num_output_tokens = self._num_reasoning_tokens = 0

    def count(self, number: int, output: RequestOutput, *, is_prompt_alone: bool = False) -> None:
        """Count the tokens of an output of prompt `number`, or the prompt's alone."""
        self._prompts[number] = len(output.prompt_token_ids), output.num_cached_tokens
        if not is_prompt_alone:
            self._num_output_tokens += sum(len(part.token_ids) for part in output.outputs)

    def count_tokens(self, num_prompt: int, num_output: int) -> None:
        """Count tokens of a prompt and an answer that are no single request's."""
        prompt, cached = self._prompts.get(-1, (0, 0))
        self._prompts[-1] = prompt + num_prompt, cached
        self._num_output_tokens += num_output

    def count_reasoning(self, num_tokens: int) -> None:
        """Count tokens of an answer as reasoning, once its end is known."""
        self._num_reasoning_tokens += num_tokens

    def usage(self) -> dict[str, Any]:
        """Tokens used so far. Prompts count once, however many answers they have."""
        prompt, cached = (sum(counts) for counts in zip(*self._prompts.values(), strict=True))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": prompt + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
        }

    def wrap(self, kind: str, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        """An answer or chunk with these choices."""
        found: dict[str, Any] = {
            "id": self.answer_id, "object": kind, "created": self._created, "model": self._model, "choices": choices,
            "system_fingerprint": self._fingerprint,
        }  # fmt: skip
        if usage:
            found["usage"] = self.usage()
        return found


class ChunkedAnswer:
    """What answers in chunks of choices have in common, as OpenAI's older endpoints stream them.

    Args:
        kind: of an answer; the name of a chunk is its own.
        options: of the stream.
    """

    def __init__(self, envelope: Envelope, options: StreamOptions | None, *, kind: str, kind_of_chunk: str) -> None:
        self._envelope, self._kind, self._kind_of_chunk = envelope, kind, kind_of_chunk
        self._at_end = options is not None and bool(options.include_usage)
        self._in_each = options is not None and bool(options.continuous_usage_stats)

    def begin(self) -> Sequence[dict[str, Any]]:
        return ()  # nothing is sent while prompts are computed

    def end(self) -> Sequence[dict[str, Any]]:
        return [self._envelope.wrap(self._kind_of_chunk, [], usage=True)] if self._at_end else ()

    def failed(self, error: ApiError) -> Sequence[dict[str, Any]]:
        return [error.body()]

    def encoded(self, events: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(map(event, events))

    def closing(self) -> bytes:
        return DONE

    def _chunks(self, choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A chunk for each choice."""
        return [self._envelope.wrap(self._kind_of_chunk, [choice], usage=self._in_each) for choice in choices]

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope.wrap(self._kind, choices, usage=True)
