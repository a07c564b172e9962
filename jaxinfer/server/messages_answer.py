"""Answers of `/v1/messages`, whole or by events, from outputs of the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.outputs import RequestOutput
from jaxinfer.server.errors import ApiError
from jaxinfer.server.events import compact, event
from jaxinfer.server.packages import from_json
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

# For each kind of block, the type of its deltas and the field that they and the block share.
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


@dataclass
class MessageForm:
    """What is known of a message before its answer begins.

    Attributes:
        num_prompt_tokens: of the conversation.
        max_tokens: of the answer, as it was asked for.
        max_model_len: most tokens of both.
        parser: makes the answer's parser; None: the answer is text.
        with_thinking: whether reasoning is part of the answer.
    """

    num_prompt_tokens: int
    max_tokens: int
    max_model_len: int
    parser: Callable[[], AnswerParser] | None = None
    with_thinking: bool = True


class MessageAnswer:
    """Answer to one conversation: blocks, one after the other.

    How many tokens of the prompt were cached is known with the first output. The first event, which comes before it,
    counts all of them as computed; the last one has the final counts.

    Args:
        name: the request's, of which the ids are made.
        model: the served model's name.
    """

    def __init__(self, name: str, model: str, form: MessageForm) -> None:
        self._name, self._model, self._form = name, model, form
        self._parser = None if form.parser is None else form.parser()
        self._blocks: list[dict[str, Any]] = []
        self._parts: list[str] = []  # of the open block
        self._is_open = self._is_cut = False  # a block; the last call
        # A client may give all requests of a conversation one name; each has a longer prompt than the one before.
        self._of_calls = hashlib.sha256(f"{name} {form.num_prompt_tokens}".encode()).hexdigest()[:24]
        self._space = self._kind_of_space = ""  # before a block of this kind, of which it may be the beginning
        self._num_cached = self._num_output = 0
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def begin(self) -> Sequence[dict[str, Any]]:
        """The message as it is before its first token."""
        return [{"type": "message_start", "message": self._message([], None, None)}]

    def add(self, number: int, output: RequestOutput) -> Sequence[dict[str, Any]]:
        """Add an output, and return the events that it brings."""
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        found: list[dict[str, Any]] = []
        for part in output.outputs:
            self._num_output += len(part.token_ids)
            self._finish_reason, self._stop_reason = part.finish_reason, part.stop_reason
            for piece in pieces_of(self._parser, part.text, is_last=part.finished):
                found += self._events(piece)
        if output.finished:
            found += self._close()
            if not self._blocks:
                found += self._open({"type": "text", "text": ""})
                if self._space and self._kind_of_space == "text":
                    self._parts.append(self._space)
                    found.append(self._delta({"type": "text_delta", "text": self._space}))
                found += self._close()
        return found

    def end(self) -> Sequence[dict[str, Any]]:
        """The reason of the end, and the tokens that were used."""
        reason, sequence = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [{"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> Sequence[dict[str, Any]]:
        return [error.anthropic_body(self._name)]

    def encoded(self, events: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(event(each, each["type"]) for each in events)

    def closing(self) -> bytes:
        return b""

    def whole(self) -> dict[str, Any]:
        """The answer, once all outputs were added."""
        return self._message(self._blocks, *self._reason())

    def _message(self, content: list[dict[str, Any]], reason: str | None, sequence: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}", "type": "message", "role": "assistant", "model": self._model,
            "content": content, "stop_reason": reason, "stop_sequence": sequence, "usage": self._usage(),
        }  # fmt: skip

    def _usage(self) -> dict[str, int]:
        return {
            "input_tokens": self._form.num_prompt_tokens - self._num_cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached, "output_tokens": self._num_output,
        }  # fmt: skip

    def _reason(self) -> tuple[str, str | None]:
        """Why the answer has ended, and the stop sequence that has ended it."""
        form = self._form
        if self._finish_reason == "length":
            has_room = form.num_prompt_tokens + self._num_output < form.max_model_len
            is_asked = has_room or self._num_output >= form.max_tokens
            return "max_tokens" if is_asked else "model_context_window_exceeded", None
        if isinstance(self._stop_reason, str):
            return "stop_sequence", self._stop_reason
        if self._is_cut:
            return "max_tokens", None
        calls = any(block["type"] == "tool_use" for block in self._blocks)
        return "tool_use" if calls else "end_turn", None

    def _events(self, piece: Piece) -> list[dict[str, Any]]:
        """What a piece of the answer adds to its blocks."""
        match piece:
            case Text(text):
                return self._more({"type": "text", "text": ""}, text)
            case Thought() if not self._form.with_thinking:
                return []
            case Thought(text):
                return self._more({"type": "thinking", "thinking": "", "signature": ""}, text)
            case CallBegin(number, name):
                self._space = ""
                block = {"type": "tool_use", "id": f"toolu_{self._of_calls}_{number}", "name": name, "input": {}}
                return [*self._close(), *self._open(block)]
            case CallArguments(_, text):
                self._parts.append(text)
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallEnd(_, is_cut):
                self._is_cut = is_cut
                self._blocks[-1]["input"] = _arguments("".join(self._parts), is_cut=is_cut)
                return self._close()

    def _more(self, empty: dict[str, Any], text: str) -> list[dict[str, Any]]:
        """Add text to the open block if it is of this kind, else to a new one."""
        kind = empty["type"]
        found = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            self._space = text = ("" if self._kind_of_space != kind else self._space) + text
            self._kind_of_space = kind
            if not text.strip():
                return []  # space alone is no block
            found, self._space = [*self._close(), *self._open(empty)], ""
        self._parts.append(text)
        delta, field = _DELTAS[kind]
        return [*found, self._delta({"type": delta, field: text})]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._blocks.append(block)
        self._parts, self._is_open = [], True
        return [{"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        """End the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open, block = False, self._blocks[-1]
        found = []
        if block["type"] in _DELTAS:
            block[_DELTAS[block["type"]][1]] = "".join(self._parts)
        if block["type"] == "thinking":
            found.append(self._delta({"type": "signature_delta", "signature": ""}))
        return [*found, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _arguments(text: str, *, is_cut: bool) -> dict[str, Any]:
    """Arguments as an object: of those that were cut, what is there; those that are no JSON, as a text in one.

    Anthropic's documentation advises clients to wrap such a text in this way.
    """
    try:
        found = from_json(text or "{}", allow_partial=is_cut)
        compact(found)  # NaN and numbers beyond all floats are read, but cannot be written
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}
