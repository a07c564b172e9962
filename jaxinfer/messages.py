"""Contents of messages in the form that a chat template reads: strings, or lists of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

type Render = Callable[[Sequence[Mapping[str, Any]]], str]

_PROBE = "a text that no template has, 7301"


@dataclass(frozen=True)
class ContentForms:
    """Which forms of contents a template shows the text of."""

    strings: bool
    lists: bool  # of parts


def content_forms(render: Render) -> ContentForms:
    """The forms that a template reads, found out with a conversation of one message in each.

    A template that expects strings writes a list as Python does, with its brackets, or refuses it; one that expects
    lists finds no parts in a string.
    """

    def rendered(content: Any) -> str:
        try:
            return render([{"role": "user", "content": content}])
        except Exception:  # whatever a template raises, it does not read that
            return ""

    of_string, of_list = rendered(_PROBE), rendered([{"type": "text", "text": _PROBE}])
    if _PROBE not in of_string:
        # Neither is what a template does that refuses a lone message of a user.
        return ContentForms(strings=_PROBE not in of_list, lists=_PROBE in of_list)
    return ContentForms(strings=True, lists=of_list == of_string)


def in_form(messages: Sequence[Mapping[str, Any]], forms: ContentForms) -> list[dict[str, Any]]:
    """Copies of messages whose contents a template of these forms reads. The texts of parts become lines of a string.

    Raises:
        ValueError: a part of a content is not text; names message and part.
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
