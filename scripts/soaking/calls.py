"""Tool calls in a whole text, found without the server: tags, and between them an object with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

_OPEN = "<tool_call>"
_HEAD = re.compile(r'<tool_call>\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_END = re.compile(r"\s*\}\s*</tool_call>\s*")
_END_OF_TEXT = re.compile(r"\s*(\}?)\s*\Z")
_STRING = r'"(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z)'
_TO_ESCAPE = re.compile(
    r"""(?P<escape>\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})|(?P<cut>\\u[0-9a-fA-F]{0,3}\Z|\\\Z)|\\|[\x00-\x1f]"""
)
_STRING_OR_BRACKET = re.compile(rf"{_STRING}|[{{}}\[\]]", re.DOTALL)


def split_calls(
    text: str, names: Collection[str], *, most: int | None, drops_space: bool
) -> tuple[str, list[dict[str, Any]]] | None:
    """The text beside the calls, and the calls; None: there is something like a call that is not written as the
    template asks for it, or a closing tag that was cut.

    Args:
        names: of tools; calls of others are text.
        most: further calls are left out; None: any number.
        drops_space: whether text before a call is dropped if it is nothing but space.
    """
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    begin_of_text = place = 0
    while (begin := text.find(_OPEN, place)) >= 0:
        head = _HEAD.match(text, begin)
        if head is None or head[1] not in names:
            place = begin + len(_OPEN)
            has_most = most is not None and len(calls) >= most
            if head is None and (has_most or _may_be_call(text[place:], names)):
                return None
            continue
        texts.append(text[begin_of_text:begin])
        end = _end_of_object(text, head.end())
        call: dict[str, Any] = {"name": head[1], "arguments": _escaped(text[head.end() : end]), "begin": begin}
        calls.append(call | {"arguments_begin": head.end(), "is_cut": end is None})
        if end is None:
            return _joined(texts, calls, drops_space), calls[:most]
        if after := _END.match(text, end):
            begin_of_text = place = after.end()
        elif after := _END_OF_TEXT.match(text, end):
            calls[-1]["is_cut"] = not after[1]
            return _joined(texts, calls, drops_space), calls[:most]
        else:
            return None
    texts.append(text[begin_of_text:])
    return _joined(texts, calls, drops_space), calls[:most]


def _joined(texts: list[str], calls: list[dict[str, Any]], drops_space: bool) -> str:
    return "".join(text for text in texts if text.strip() or not (calls and drops_space))


def _may_be_call(text: str, names: Collection[str]) -> bool:
    """Whether a text after an opening tag may be a call in another order, or without arguments."""
    try:
        found, _ = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except ValueError:
        return '"arguments"' in text or '"parameters"' in text
    return isinstance(found, dict) and found.get("name") in names


def _end_of_object(text: str, begin: int) -> int | None:
    """The place after the brace that closes the one at `begin`; None: there is none."""
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text, begin):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if not depth:
            return found.end()
    return None


def _escaped(text: str) -> str:
    """Arguments with the line breaks of their strings, and backslashes that escape nothing, as JSON writes them."""

    def part(found: re.Match[str]) -> str:
        if found["cut"] is not None:
            return ""  # it waits for what it may escape
        if found["escape"] is not None:
            return found[0]
        return "\\\\" if found[0] == "\\" else json.dumps(found[0])[1:-1]

    return re.sub(_STRING, lambda found: _TO_ESCAPE.sub(part, found[0]), text, flags=re.DOTALL)
