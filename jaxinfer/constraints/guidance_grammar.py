"""Grammars of structured output as llguidance takes them, and what it says when it refuses one."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from jaxinfer.constraints.structured_outputs import StructuredOutputsParams

# Models that may write any amount of whitespace between two parts of a JSON text sometimes write nothing else until
# max_tokens. Within this bound they can still break lines and indent, by four spaces at four levels.
DEFAULT_WHITESPACE = r"[ \n\r\t]{0,20}"
# In the names of properties that a schema does not list, llguidance allows \u escapes, and so {"\u0061": ...} for a
# listed "a", which escapes its schema. Without them a string cannot have control characters but the usual ones: schemas
# that list names do without, unless they may need some.
_LISTS_NAMES = re.compile('"(properties|patternProperties)"')
_NEEDS_CONTROL_CHARACTERS = re.compile(r"\\u00[01]|\x7f|\\\\[xuUv0ac]")  # as such, or as a regular expression has them
_ESCAPES = '"\\bfnrt'
# Schemas that are a bool: that of any value, and that of none.
_BOOLS = {"true": "{}", "false": '{"allOf": [false]}'}
# What comes after reasoning, and whitespace between the two.
_INNER, _SPACE = "answer", r"/[ \n\r\t]{0,8}/"
_MOST_OF_LINE = 160  # characters
# llguidance appends the state of its parser to messages.
_STATE = ("<state>", "<non-verbose/>")


def grammar_of(params: StructuredOutputsParams) -> str:
    """Return the grammar that a request asks for, in llguidance's JSON form.

    Texts are put into it as JSON strings or as checked JSON: none is read as a part of the form.
    """
    match params.kind:
        case "regex":
            inner = _of_regex(params.text)
        case "grammar":
            inner = json.dumps({"lark_grammar": params.text}, ensure_ascii=False)
        case "choice":
            inner = _of_regex("|".join(_literal(text) for text in json.loads(params.text)))
        case _:
            schema = _BOOLS.get(params.text, params.text)
            options = f'"x-guidance": {json.dumps(_json_options(params))}'
            # The schema is not parsed again.
            inner = f'{{"json_schema": {schema[:-1]}{", " if schema != "{}" else ""}{options}}}}}'
    if params.reasoning_tags is None:
        return f'{{"grammars": [{inner}]}}'
    before = json.dumps({"lark_grammar": _reasoning(*params.reasoning_tags)}, ensure_ascii=False)
    return f'{{"grammars": [{before}, {{"name": "{_INNER}", {inner[1:]}]}}'


def _of_regex(pattern: str) -> str:
    (found,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return json.dumps({"lark_grammar": found["lark_grammar"]}, ensure_ascii=False)


def _reasoning(opening: str, closing: str) -> str:
    """Return a grammar in Lark's notation of reasoning, and what is named `_INNER` after it."""
    thought = f"thought[suffix={json.dumps(closing, ensure_ascii=False)}]: /(?s:.*)/"
    if not opening:
        return f"start: thought SPACE @{_INNER}\n{thought}\nSPACE: {_SPACE}\n"
    start = f"start: ({json.dumps(opening, ensure_ascii=False)} thought SPACE)? @{_INNER}"
    return f"{start}\n{thought}\nSPACE: {_SPACE}\n"


def one_line(message: object) -> str:
    """Return a message on one line, without the parser's state; long lines, which quote the grammar, are cut."""
    text = str(message)
    for mark in _STATE:
        text = text.partition(mark)[0]
    lines = [line if len(line) <= _MOST_OF_LINE else f"{line[:_MOST_OF_LINE]}..." for line in text.splitlines()]
    return " ".join(" ".join(lines).split())


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if _LISTS_NAMES.search(params.text) and not _NEEDS_CONTROL_CHARACTERS.search(params.text):
        options["json_allowed_escapes"] = _ESCAPES
    if params.disable_any_whitespace:
        return options | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    pattern = DEFAULT_WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
    return options | {"whitespace_flexible": True, "whitespace_pattern": pattern}


def _literal(text: str) -> str:
    """Return a regular expression that matches just this text."""
    return "".join(letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)
