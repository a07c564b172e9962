"""Answers of `/v1/responses`, whole or as events, from outputs of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.outputs import RequestOutput
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.errors import ApiError, cut
from jaxinfer.server.events import named_event
from jaxinfer.server.parse.pieces import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Piece,
    Text,
    Thought,
    pieces_of,
)
from jaxinfer.server.responses_items import CallItem, Event, GrowingItem, Logprobs, MessageItem, ReasoningItem
from jaxinfer.server.token_texts import TokenTexts


@dataclass
class ResponseForm:
    """What a response says besides its output.

    Attributes:
        echo: fields of the request, as the response has them.
        top_logprobs: None: no log probabilities.
        parser: of the answer; None: its text is a message as it is.
        with_reasoning: whether reasoning is part of the output.
        status: of the response before it runs.
    """

    echo: dict[str, Any]
    top_logprobs: int | None = None
    parser: AnswerParser | None = None
    with_reasoning: bool = True
    status: str = "in_progress"


class ResponseAnswer:
    """Answer to one conversation.

    Args:
        name: by which its id and those of its items differ from all others.
        ended: called with the response when it has ended, before any client is told.
    """

    def __init__(
        self,
        name: str,
        envelope: Envelope,
        form: ResponseForm,
        texts: TokenTexts,
        ended: Callable[[dict[str, Any]], None],
    ) -> None:
        self.response_id = f"resp_{name}"
        self._name, self._envelope, self._form, self._texts, self._ended = name, envelope, form, texts, ended
        self._created = int(time.time())
        self._status, self._error = form.status, None
        self._items: list[GrowingItem] = []
        self._open: GrowingItem | None = None
        self._space = ""  # that may be the beginning of a message
        self._logprobs: Logprobs = []  # of tokens whose text has not come yet
        self._prompt_token_ids: list[int] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._is_cut = False  # whether the answer has ended within a call
        self._num_events = 0
        self._final: dict[str, Any] | None = None

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        if self._final is not None:
            return self._final
        is_incomplete = self._status == "incomplete"
        return {
            "id": self.response_id, "object": "response", "created_at": self._created, "completed_at": None,
            "status": self._status, "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": [item.whole() for item in self._items],
            "usage": self._usage() if self._prompt_token_ids else None,
            **self._form.echo,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        found = self._envelope.usage()
        return {
            "input_tokens": found["prompt_tokens"],
            # Pages of every prompt stay for later ones: nothing is written to a cache beside them.
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": found["completion_tokens_details"],
            "total_tokens": found["total_tokens"],
        }

    def begin(self) -> list[Event]:
        """Events before the first output."""
        return self._numbered(
            [{"type": f"response.{name}", "response": self.response()} for name in ("created", "in_progress")]
        )

    def add(self, number: int, output: RequestOutput) -> list[Event]:
        """Add an output, and return the events that it brings."""
        self._envelope.count(number, output)
        self._status, self._prompt_token_ids = "in_progress", output.prompt_token_ids
        found = []
        for part in output.outputs:  # there is one
            self._token_ids += part.token_ids
            if self._form.top_logprobs is not None:
                top = self._form.top_logprobs
                self._logprobs += [self._texts.of_chat(entry, top) for entry in part.logprobs or ()]
            is_last = part.finish_reason is not None
            for piece in pieces_of(self._form.parser, part.text, is_last=is_last):
                found += self._take(piece)
            if is_last:
                is_cut = self._is_cut and not isinstance(part.stop_reason, str)
                self._finish_reason = "length" if is_cut else part.finish_reason
                self._envelope.count_reasoning(self._num_reasoning_tokens())
                found += self._finish()
        return self._numbered(found)

    def _take(self, piece: Piece) -> list[Event]:
        """Add a piece of the answer."""
        match piece:
            case Text(text):
                if not isinstance(self._open, MessageItem):
                    self._space += text
                    if not self._space.strip():
                        return []
                    return self._begin_message()
                return self._open.add(text, self._taken_logprobs())
            case Thought(text):
                if not self._form.with_reasoning:
                    return []
                found = []
                if not isinstance(self._open, ReasoningItem):
                    found = self._begin(ReasoningItem(self._name, len(self._items)))
                return found + self._add(text)
            case CallBegin(_, name):
                self._space = ""
                return self._begin(CallItem(self._name, len(self._items), name))
            case CallArguments(_, text):
                return self._add(text)
            case CallEnd(_, is_cut):
                self._is_cut = is_cut
                return self._close("incomplete" if is_cut else "completed")

    def _begin(self, item: GrowingItem) -> list[Event]:
        found = self._close("completed")
        self._items.append(item)
        self._open = item
        return found + item.begin()

    def _begin_message(self) -> list[Event]:
        """Begin a message with the space that was held back."""
        if self._form.top_logprobs is not None:
            del self._logprobs[: self._num_reasoning_tokens()]
        found, text = self._begin(MessageItem(self._name, len(self._items))), self._space
        self._space = ""
        return found + self._add(text, self._taken_logprobs()) if text else found

    def _add(self, text: str, logprobs: Logprobs | None = None) -> list[Event]:
        return [] if self._open is None else self._open.add(text, logprobs or [])

    def _close(self, status: str) -> list[Event]:
        found = [] if self._open is None else self._open.end(status)
        self._open = None
        return found

    def _taken_logprobs(self) -> Logprobs:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _num_reasoning_tokens(self) -> int:
        end = 0 if self._form.parser is None else self._form.parser.reasoning_end
        return self._texts.num_tokens(self._prompt_token_ids, self._token_ids, end)

    def _finish(self) -> list[Event]:
        """End the items: an answer without any, or one that was reasoning alone by its own will, has a message too."""
        found, is_cut = [], self._finish_reason == "length"
        if all(isinstance(item, ReasoningItem) for item in self._items) and not (is_cut and self._items):
            found = self._begin_message()
        if self._logprobs and isinstance(self._open, MessageItem):
            found += self._add("", self._taken_logprobs())
        return found + self._close("incomplete" if is_cut else "completed")

    def end(self) -> list[Event]:
        """The event after the last output."""
        response = self.whole()
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def whole(self) -> dict[str, Any]:
        """The response, once all outputs were added."""
        return self._end_as("incomplete" if self._finish_reason == "length" else "completed")

    def failed(self, error: ApiError) -> list[Event]:
        """Events of an error that ends the response."""
        found = self._close("incomplete")
        self._error = {"code": "invalid_prompt" if error.status == 400 else "server_error", "message": cut(str(error))}
        return self._numbered([*found, {"type": "response.failed", "response": self._end_as("failed")}])

    def cancel(self) -> dict[str, Any]:
        """End the response as one that was cancelled."""
        self._close("incomplete")
        return self._end_as("cancelled")

    @property
    def has_ended(self) -> bool:
        """Whether it is final, and kept if it is to be."""
        return self._final is not None

    def _end_as(self, status: str) -> dict[str, Any]:
        if self._final is None:
            self._status = status
            self._final = {**self.response(), "completed_at": int(time.time()) if status == "completed" else None}
            self._ended(self._final)
        return self._final

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

    def encoded(self, events: Sequence[Event]) -> bytes:
        return b"".join(map(named_event, events))

    def closing(self) -> bytes:
        return b""  # the last event is the end
