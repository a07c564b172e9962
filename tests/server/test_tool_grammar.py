"""Grammars of answers with tool calls, in every format, against the parser that reads such answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxinfer.server.parse.formats import FORMATS
from jaxinfer.server.parse.machine import Parser
from jaxinfer.server.parse.pieces import CallArguments, CallBegin
from jaxinfer.server.tool_grammar import grammar_of_answers, grammar_of_calls
from tests.constraints.guided import accepts, compiled

TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "to": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
# A call of `add` with a = 1, one without its argument, and what begins a call.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
        "<tool_call>",
    ),
    "smollm2": (
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>',
        '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>',
        "<tool_call>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "<tool_call>",
    ),
    "llama3_json": ('{"name": "add", "parameters": {"a": 1}}', '{"name": "add", "parameters": {}}', "{"),
}
BETWEEN = {"llama3_json": "; "}
FREE = ["", "just text", "a {brace} and <tags>", "a <tool_cal", " \n"]


def calls_in(name: str, text: str) -> list[Any]:
    parser = Parser(FORMATS[name], TOOLS)
    pieces = parser.feed(text) + parser.finish()
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = ["".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == n) for n in range(9)]
    return [(name, json.loads(arguments[number])) for number, name in enumerate(names)]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_strict_tools_keep_to_their_schemas_beside_free_text(name):
    automaton = compiled(grammar=grammar_of_answers(FORMATS[name], TOOLS, is_single=False))
    call, wrong, begins = CALLS[name]
    has_marker = bool(FORMATS[name].open)
    free = [text for text in FREE if has_marker or text.strip() or not text]
    assert [text for text in free if not accepts(automaton, text)] == []
    assert accepts(automaton, call) and calls_in(name, call) == [("add", {"a": 1})]
    assert not accepts(automaton, wrong) and not accepts(automaton, f"{begins} no call")
    two = f"{call}{BETWEEN.get(name, chr(10))}{call}"
    assert accepts(automaton, two) and len(calls_in(name, two)) == 2
    if has_marker:
        assert accepts(automaton, f"so: {call} and then {call} done") and not accepts(automaton, f"so: {wrong}")


@pytest.mark.parametrize("name", FORMATS)
def test_where_one_call_is_allowed_a_second_one_is_refused(name):
    call = CALLS[name][0]
    two = f"{call}{BETWEEN.get(name, chr(10))}{call}"
    for grammar in (grammar_of_answers, grammar_of_calls):
        single, several = (compiled(grammar=grammar(FORMATS[name], TOOLS, is_single=one)) for one in (True, False))
        assert accepts(single, call) and accepts(several, call) and not accepts(single, two)
        assert name == "smollm2" or accepts(several, two)


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_has_no_text_around_it(name):
    automaton = compiled(grammar=grammar_of_calls(FORMATS[name], TOOLS, is_single=True))
    call, wrong, _ = CALLS[name]
    assert accepts(automaton, call)
    assert not any(accepts(automaton, text) for text in ("", "text", wrong, f"so: {call}", f"{call} so"))


@pytest.mark.parametrize("name", [name for name, calls in FORMATS.items() if calls.open])
def test_an_answer_by_a_schema_stands_beside_calls(name):
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    automaton = compiled(grammar=grammar_of_calls(FORMATS[name], TOOLS, is_single=False, answer=schema))
    call, wrong, _ = CALLS[name]
    assert accepts(automaton, call) and accepts(automaton, '{"colour": "red"}')
    assert not any(accepts(automaton, text) for text in ("text", wrong, '{"colour": "green"}', call + " so"))


def test_annotations_of_a_schema_are_none_of_the_grammar():
    long = {"description": "x" * 70_000, "title": "T", "default": 1}
    described = {"type": "object", "properties": {"description": {"type": "integer", **long}, "title": {}}, **long}
    plain = {"type": "object", "properties": {"description": {"type": "integer"}, "title": {}}}
    grammars = [grammar_of_calls(FORMATS["hermes"], {"f": schema}, is_single=True) for schema in (described, plain)]
    assert grammars[0] == grammars[1]


def test_texts_between_tags_keep_to_what_can_be_kept_to():
    unit = {"type": "string", "enum": ["kelvin", "celsius"]}
    schema = {"f": {"properties": {"u": unit, "short": {"type": "string", "maxLength": 3}}, "required": ["u", "short"]}}
    automaton = compiled(grammar=grammar_of_calls(FORMATS["qwen3_coder"], schema, is_single=True))

    def call(unit: str, short: str) -> str:
        values = f"<parameter=u>\n{unit}\n</parameter>\n<parameter=short>\n{short}\n</parameter>\n"
        return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"

    assert accepts(automaton, call("kelvin", "abc"))
    assert not accepts(automaton, call('"kelvin"', "abc")) and not accepts(automaton, call("kelvin", "abcd"))
    with pytest.raises(ValueError, match="pattern of the parameter p of f"):
        wrong = {"f": {"properties": {"p": {"type": "string", "pattern": "a+"}}}}
        grammar_of_calls(FORMATS["qwen3_coder"], wrong, is_single=True)
