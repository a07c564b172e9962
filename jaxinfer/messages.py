"""Message contents in the form that a chat template reads: strings, or lists of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

type Render = Callable[[Sequence[Mapping[str, Any]]], str]

_PROBE = "a text that no template has, 7301"


@dataclass(frozen=True)
class ContentForms:
    """The forms of message content whose text a template renders."""

    strings: bool
    lists: bool  # of parts


def content_forms(render: Render) -> ContentForms:
    """Find the forms that a template reads, by rendering a conversation of one message in each.

    A template that expects strings writes a list as Python does, with its brackets, or refuses it; one that expects
    lists finds no parts in a string.
    """

    def rendered(content: Any) -> str:
        try:
            return render([{"role": "user", "content": content}])
        except Exception:  # whatever the template raises, it does not read this form
            return ""

    from_string, from_list = rendered(_PROBE), rendered([{"type": "text", "text": _PROBE}])
    if _PROBE not in from_string:
        # If neither form is read, the template refuses a lone user message; strings are the default then.
        return ContentForms(strings=_PROBE not in from_list, lists=_PROBE in from_list)
    return ContentForms(strings=True, lists=from_list == from_string)


def in_form(messages: Sequence[Mapping[str, Any]], forms: ContentForms) -> list[dict[str, Any]]:
    """Return copies of messages with contents that a template of these forms reads.

    Where it reads strings only, the texts of parts become lines of one string.

    Raises:
        ValueError: a part is not text; the message has its number and the part's.
    """
    return [{**message, **_content_of(message, number, forms)} for number, message in enumerate(messages)]


def _content_of(message: Mapping[str, Any], number: int, forms: ContentForms) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {} if forms.strings else {"content": [{"type": "text", "text": content}]}
    if not isinstance(content, list | tuple):
        return {}
    texts = [_text_of(part, f"part {place} of message {number}") for place, part in enumerate(content)]
    return {"content": [{"type": "text", "text": text} for text in texts] if forms.lists else "\n".join(texts)}


def _text_of(part: Any, name: str) -> str:
    if not isinstance(part, Mapping):
        raise ValueError(f"{name} must be {{'type': 'text', 'text': ...}}, got {part!r}")
    if part.get("type") != "text":
        raise ValueError(f"{name} has the type {part.get('type')!r}: only parts of the type 'text' are read")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{name} must have a string as its text, got {part.get('text')!r}")
    return part["text"]
