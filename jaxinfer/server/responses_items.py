"""Items of a response as they grow, each with the events of its stream."""

from __future__ import annotations

from typing import Any, Protocol

type Event = dict[str, Any]
type Logprobs = list[dict[str, Any]]


class GrowingItem(Protocol):
    """An item of a response. Its events have no sequence numbers yet."""

    def begin(self) -> list[Event]: ...

    def add(self, text: str, logprobs: Logprobs) -> list[Event]: ...

    def end(self, status: str) -> list[Event]: ...

    def whole(self) -> dict[str, Any]:
        """The item as it is now."""
        ...


class _PartItem:
    """An item with one part of text.

    Args:
        index: its place in the output.
        fields: those that are its own.
        kind: of the part, after which its events are named.
    """

    def __init__(self, item_id: str, index: int, fields: dict[str, Any], kind: str) -> None:
        self._id, self._index, self._fields, self._kind = item_id, index, fields, kind
        self._texts: list[str] = []
        self._logprobs: Logprobs = []
        self._status = "in_progress"

    def _part(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": self._kind, "text": "".join(self._texts)}
        if self._kind == "output_text":
            found |= {"annotations": [], "logprobs": list(self._logprobs)}
        return found

    def _logprobs_of(self, logprobs: Logprobs) -> dict[str, Any]:
        return {"logprobs": logprobs} if self._kind == "output_text" else {}

    def whole(self) -> dict[str, Any]:
        return {"id": self._id, **self._fields, "status": self._status, "content": [self._part()]}

    def begin(self) -> list[Event]:
        return [
            {
                "type": "response.output_item.added", "output_index": self._index,
                "item": self.whole() | {"content": []},
            },
            self._of_part("content_part.added", {"part": self._part()}),
        ]  # fmt: skip

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [self._of_part(f"{self._kind}.delta", {"delta": text, **self._logprobs_of(logprobs)})]

    def end(self, status: str) -> list[Event]:
        self._status, part = status, self._part()
        return [
            self._of_part(f"{self._kind}.done", {"text": part["text"], **self._logprobs_of(list(self._logprobs))}),
            self._of_part("content_part.done", {"part": part}),
            {"type": "response.output_item.done", "output_index": self._index, "item": self.whole()},
        ]

    def _of_part(self, name: str, more: dict[str, Any]) -> Event:
        place = {"item_id": self._id, "output_index": self._index, "content_index": 0}
        return {"type": f"response.{name}", **place, **more}


class MessageItem(_PartItem):
    """Text of the answer."""

    def __init__(self, name: str, index: int) -> None:
        super().__init__(f"msg_{name}_{index}", index, {"type": "message", "role": "assistant"}, "output_text")


class ReasoningItem(_PartItem):
    """Reasoning; there is no summary of it."""

    def __init__(self, name: str, index: int) -> None:
        super().__init__(f"rs_{name}_{index}", index, {"type": "reasoning", "summary": []}, "reasoning_text")


class CallItem:
    """A call of a function."""

    def __init__(self, name: str, index: int, function: str) -> None:
        self._id, self._call_id, self._index = f"fc_{name}_{index}", f"call_{name}_{index}", index
        self._function, self._arguments, self._status = function, "", "in_progress"

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._id, "type": "function_call", "status": self._status, "call_id": self._call_id,
            "name": self._function, "arguments": self._arguments,
        }  # fmt: skip

    def begin(self) -> list[Event]:
        return [{"type": "response.output_item.added", "output_index": self._index, "item": self.whole()}]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._arguments += text
        return [self._of_arguments("delta", {"delta": text})]

    def end(self, status: str) -> list[Event]:
        self._status = status
        return [
            self._of_arguments("done", {"name": self._function, "arguments": self._arguments}),
            {"type": "response.output_item.done", "output_index": self._index, "item": self.whole()},
        ]

    def _of_arguments(self, name: str, more: dict[str, Any]) -> Event:
        place = {"item_id": self._id, "output_index": self._index}
        return {"type": f"response.function_call_arguments.{name}", **place, **more}
