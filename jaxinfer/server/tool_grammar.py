"""Grammars of answers that call tools, in the format of a model's own calls and in Lark's notation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.constraints.schema_text import schema_text, without_annotations
from jaxinfer.server.parse.formats import CallFormat

_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

type Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> schema of its arguments."""


def grammar_of_calls(
    calls: CallFormat, schemas: Schemas, *, is_single: bool, answer: Mapping[str, Any] | None = None
) -> str:
    """The grammar of an answer that is one call, or several unless `is_single`; or JSON by the schema of an answer.

    Raises:
        ValueError: a schema cannot be kept to.
    """
    first, between, last = "", _text("\n"), ""
    if calls.body == "array":
        first, between, last = _text(f"{calls.open}["), _text(", "), _text(f"]{calls.close}")
    elif not calls.open:
        between = _text(f"{calls.separator} ")
    more = "" if is_single else f" ({between} call)*"
    lines = [f"start: {first} call{more} {last}"]
    if answer is not None:
        lines = [f"start: answer | {first} call{more} {last}", json_rule("answer", answer)]
    return _grammar(lines, calls, schemas, opening=calls.open)


def grammar_of_answers(calls: CallFormat, schemas: Schemas, *, is_single: bool) -> str:
    """The grammar of an answer that may have text, and calls that keep to their schemas.

    An answer without markers of calls, in the formats that have none, is a call if it begins with a brace.

    Raises:
        ValueError: a schema cannot be kept to.
    """
    if not calls.open:
        more = "" if is_single else f" ({_text(f'{calls.separator} ')} call)*"
        return _grammar([f"start: TEXT | call{more}", r"TEXT: /([^ \n\r\t{](?s:.*))?/"], calls, schemas, opening="")
    markers = [marker for marker in (calls.open, calls.bare_open) if marker]
    without = " & ".join(f"~/(?s:.*){_pattern(marker)}(?s:.*)/" for marker in markers)
    # Text up to a marker is read as one part with it: what may be its beginning is not known before.
    ahead = f"before[suffix={_text(calls.open)}]: {'AHEAD' if calls.bare_open else '/(?s:.*)/'}"
    one = "before call"
    if calls.body == "array":
        more = "" if is_single else f" ({_text(', ')} call)*"
        one = f"before {_text('[')} call{more} {_text(f']{calls.close}')}"
    lines = [
        f"start: TEXT | {one} TEXT" if is_single else f"start: ({one})* TEXT",
        ahead,
        f"TEXT: /(?s:.*)/ & {without}",
    ]
    if calls.bare_open:
        lines.append(f"AHEAD: /(?s:.*)/ & ~/(?s:.*){_pattern(calls.bare_open)}(?s:.*)/")
    return _grammar(lines, calls, schemas, opening="")


def _grammar(lines: list[str], calls: CallFormat, schemas: Schemas, *, opening: str) -> str:
    rules = [_rule_of_call(calls, opening, number, *of) for number, of in enumerate(schemas.items())]
    one = " | ".join(f"call_{number}" for number in range(len(schemas)))
    return "\n".join([*lines, f"call: {one}", *rules]) + "\n"


def _rule_of_call(calls: CallFormat, opening: str, number: int, name: str, schema: Mapping[str, Any]) -> str:
    if calls.body == "xml":
        return _rule_of_tags(calls, opening, number, name, schema)
    key = "parameters" if calls.name.startswith("llama") else "arguments"
    before, after = f'{{"name": {json.dumps(name)}, "{key}": ', "}"
    if calls.body == "json" and calls.open:
        before, after = f"{opening}\n{before}", f"{after}\n{calls.close}"
    return f"call_{number}: {_text(before)} arguments_{number} {_text(after)}\n" + json_rule(
        f"arguments_{number}", schema
    )


def _rule_of_tags(calls: CallFormat, opening: str, number: int, name: str, schema: Mapping[str, Any]) -> str:
    """The rules of a call whose arguments are tags, in the order of the schema."""
    required = set(schema.get("required", ()))
    parts, rules = [], []
    for place, (key, inner) in enumerate(schema.get("properties", {}).items()):
        rule = f"value_{number}_{place}"
        is_string = isinstance(inner, Mapping) and inner.get("type") == "string"
        rules.append(f"{rule}: {_text_in_tags(name, key, inner)}" if is_string else json_rule(rule, inner))
        part = f"{_text(f'<parameter={key}>{chr(10)}')} {rule} {_text(f'{chr(10)}</parameter>{chr(10)}')}"
        parts.append(part if key in required else f"({part})?")
    before, after = f"{opening}\n<function={name}>\n", f"</function>\n{calls.close}"
    return "\n".join([f"call_{number}: {_text(before)} {' '.join(parts)} {_text(after)}", *rules])


def _text_in_tags(name: str, key: str, schema: Mapping[str, Any]) -> str:
    """What a text may be that is written between tags as it is.

    Raises:
        ValueError: the schema has a keyword that is not kept to there.
    """
    if other := next((each for each in ("pattern", "format") if each in schema), None):
        raise ValueError(f"tools: {other} of the parameter {key} of {name} cannot be kept to in this model's calls")
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(given, list) and given and all(isinstance(each, str) for each in given):
        return " | ".join(map(_text, given))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return "/[^<]*/" if not least and most == "" else f"/[^<]{{{least},{most}}}/"


def json_rule(name: str, schema: Any) -> str:
    """The rule of a value that is JSON by a schema, written as the chat templates write it."""
    checked = json.loads(schema_text(without_annotations(schema), close_objects=False))
    if isinstance(checked, dict):
        checked["x-guidance"] = _AS_WRITTEN
    return f"{name}: %json {json.dumps(checked, ensure_ascii=False)}"


def _text(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression in Lark's notation that matches just this text."""
    return "".join(letter if letter.isalnum() else f"\\x{ord(letter):02x}" for letter in text)
