"""What grammars of structured output allow and refuse, with the traps of JSON schemas and of regular expressions."""

import json
import re

import pytest

from jaxinfer.constraints.guidance_grammar import one_line
from tests.constraints.guided import EOS, accepts, after, compiled, on, tokens_of

UNSUPPORTED = [
    ({"not": {"type": "null"}}, 'Unimplemented keys: ["not"]'),
    ({"if": {"type": "null"}, "then": {}}, 'Unimplemented keys: ["if", "then"]'),
    ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"type": "array", "contains": {"type": "null"}}, 'Unimplemented keys: ["contains"]'),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, 'Unimplemented keys: ["propertyNames"]'),
    ({"dependentRequired": {"a": ["b"]}}, 'Unimplemented keys: ["dependentRequired"]'),
    ({"dependentSchemas": {"a": {}}}, 'Unimplemented keys: ["dependentSchemas"]'),
    ({"unevaluatedProperties": False}, 'Unimplemented keys: ["unevaluatedProperties"]'),
    ({"$dynamicRef": "#a"}, 'Unimplemented keys: ["$dynamicRef"]'),
    ({"items": {"properties": {"deep": {"not": {}}}}}, 'Unimplemented keys: ["not"]'),
    ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf constraints are not supported"),
    ({"type": "string", "format": "iban"}, "Unknown format: iban"),
    ({"$ref": "http://example.com/schema"}, "Resource 'http://example.com/schema' is not present"),
    ({"$ref": "#/$defs/nope"}, "Pointer '/$defs/nope' does not exist"),
    ({"patternProperties": {"^s": {}, "^si": {}}}, "patternProperty regexes /^s/ and /^si/ are not disjoint"),
    ({"type": "string", "pattern": "(?=a)"}, "look-around, including look-ahead and look-behind, is not supported"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ({"type": "text"}, "Invalid type: text"),
    ({"enum": []}, "Unsatisfiable schema"),
    (False, "Unsatisfiable schema: schema is false"),
    ({"$ref": "#"}, "no token is allowed here"),
]


@pytest.mark.parametrize(("schema", "reason"), UNSUPPORTED, ids=[str(number) for number in range(len(UNSUPPORTED))])
def test_a_schema_that_cannot_be_enforced_is_refused_by_keyword_on_one_line(schema, reason):
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        compiled(json=schema)
    message = str(caught.value)
    assert message.startswith("structured_outputs.json: ") and "\n" not in message and "verbose" not in message


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"regex": "(?=a)b"}, "structured_outputs.regex: .*look-around"),
        ({"regex": r"(a)\1"}, "structured_outputs.regex: .*backreferences are not supported"),
        ({"regex": r"\bword"}, "structured_outputs.regex: .*lookarounds not supported"),
        ({"regex": "(a"}, "structured_outputs.regex: .*unclosed group"),
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex: no token is allowed here"),
        ({"regex": r"abc[^\s\S]"}, "structured_outputs.regex: no token is allowed here"),
        ({"grammar": "start: missing"}, "structured_outputs.grammar: .*unknown name"),
        ({"grammar": 'begin: "a"'}, "structured_outputs.grammar: no start rule found"),
        ({"grammar": '{"grammars": [{"json_schema": {}}]}'}, "structured_outputs.grammar: .*expecting rule"),
        ({"grammar": 'start: %json {"not": {}}'}, r'structured_outputs.grammar: .*Unimplemented keys: \["not"\]'),
        ({"json": {}, "whitespace_pattern": "("}, "structured_outputs.json: .*unclosed group"),
    ],
)
def test_another_grammar_that_is_none_is_refused_on_one_line(given, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        compiled(**given)
    assert "\n" not in str(caught.value)


def test_the_state_of_a_parser_is_cut_from_messages():
    assert one_line("it\nis   wrong\n<state>\nstack: [secret]\n</state>") == "it is wrong"
    assert one_line(ValueError("plain")) == "plain"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"regex": "(" * 30_000}, "unclosed group"),
        ({"regex": "a" * 60_000 + "(?=b)"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"grammar": "start: " + "(" * 30_000}, "lark grammar too deeply nested"),
        ({"grammar": "start: %json " + "[" * 30_000}, "recursion limit exceeded"),
        ({"json": {"type": "string", "pattern": "(" * 30_000}}, "regex parse error"),
    ],
)
def test_a_grammar_as_deep_as_it_is_long_is_refused_by_a_short_message(given, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        compiled(**given)
    assert len(str(caught.value)) < 1_000


def test_a_text_of_a_schema_is_never_read_as_a_part_of_the_grammar():
    """llguidance pastes texts of schemas into its own form, where such a text would add a grammar."""
    injection = '"}}, {"lark_grammar": "start: /x/"}], "a": [{"b": {"c": "'
    automaton = compiled(json=json.dumps({"const": injection}))
    assert accepts(automaton, json.dumps(injection)) and not accepts(automaton, "x")
    automaton = compiled(
        json={"properties": {injection: {"type": "null"}}, "additionalProperties": False, "type": "object"}
    )
    assert accepts(automaton, json.dumps({injection: None})) and not accepts(automaton, "x")
    choice = ['" | /x+/ | "', "a|b", ".", "\\", "/", "\n", "(", "\u2028", "\x01", "日本"]
    automaton = compiled(choice=choice)
    assert [accepts(automaton, text) for text in choice] == [True] * len(choice)
    assert not any(accepts(automaton, text) for text in ("x", "a", "b", "日", "c", ""))


def test_choices_that_begin_alike_can_all_be_written():
    automaton = compiled(choice=["a", "abc", "ab"])
    assert [accepts(automaton, text) for text in ("a", "ab", "abc", "b", "abcd", "")] == [True] * 3 + [False] * 3
    assert automaton.ends(after(automaton, "abc")) and not automaton.ends(after(automaton, "ab"))


def test_properties_are_written_in_the_order_of_the_schema_whatever_is_required_first():
    b, a = {"b": {"type": "null"}}, {"a": {"type": "null"}}
    for names, text, other in (
        (b | a, '{"b":null,"a":null}', '{"a":null,"b":null}'),
        (a | b, '{"a":null,"b":null}', '{"b":null,"a":null}'),
    ):
        automaton = compiled(json={"type": "object", "properties": names, "required": ["a", "b"]})
        assert accepts(automaton, text) and not accepts(automaton, other)


def test_a_listed_property_comes_once_and_only_by_its_schema_even_in_escapes():
    automaton = compiled(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert accepts(automaton, '{"a":1,"b":"x"}') and accepts(automaton, '{"b":"x"}')
    for text in ('{"a":"x"}', '{"b":1,"a":2}', '{"a":1,"a":2}', r'{"\u0061":"x"}', r'{"a":1,"\u0061":"x"}'):
        assert not accepts(automaton, text), text


def test_control_characters_are_written_where_the_schema_has_them():
    for schema in ({"const": "\x01\x7f"}, {"type": "string", "pattern": r"^\x01\x7f$"}):
        automaton = compiled(json={"type": "object", "properties": {"a": schema}})
        assert accepts(automaton, r'{"a":"\u0001\u007f"}')


def test_other_properties_may_come_twice():
    """A known limit: a parser keeps the last, so an object may have fewer properties than were counted."""
    automaton = compiled(json={"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2})
    assert accepts(automaton, '{"a":1,"a":2}') and not accepts(automaton, '{"a":1}')


def test_a_closed_object_takes_no_other_property():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(compiled(json=schema), '{"a":1,"b":2}')
    closed = compiled(json=schema, disable_additional_properties=True)
    assert accepts(closed, '{"a":1}') and not accepts(closed, '{"a":1,"b":2}') and not accepts(closed, '{"b":2}')


def test_a_schema_that_requires_itself_and_a_number_have_no_end_but_that_of_max_tokens():
    automaton = compiled(json={"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    state = automaton.start
    for _ in range(100):
        for token in tokens_of('{"a":'):
            state = automaton.advance(state, token)
        assert not automaton.is_final(state)
    anything = compiled(json={})
    state = after(anything, "1" * 400)
    assert anything.is_final(state) and {tokens_of("7")[0], EOS} <= set(on(anything, state))


def test_any_object_is_an_object():
    automaton = compiled(json_object=True)
    assert accepts(automaton, '{"a": [1, {"b": null}], "c": "d"}') and accepts(automaton, "{}")
    assert not any(accepts(automaton, text) for text in ("[]", "1", '"a"', "null", ""))


def test_whitespace_between_parts_is_bounded():
    automaton = compiled(json={"type": "array", "items": {"type": "integer"}})
    assert [accepts(automaton, f"[{space}1]") for space in ("", " " * 20, "\n\t\r " * 5, " " * 21, "\n" * 30)] == [
        True
    ] * 3 + [False] * 2
    assert accepts(automaton, json.dumps([1, 2], indent=4)) and accepts(automaton, "[1,2]")
    assert accepts(automaton, "[1, 2]") and not accepts(automaton, " [1]") and not accepts(automaton, "[1] ")


def test_nested_texts_may_be_indented_four_levels():
    value = {"a": {"b": {"c": {"d": 1}}}}
    assert accepts(compiled(json={"type": "object"}), json.dumps(value, indent=4))


def test_whitespace_is_that_of_json_dumps_or_of_a_pattern_if_asked_for():
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    compact = compiled(json=schema, disable_any_whitespace=True)
    assert accepts(compact, json.dumps({"a": [1, 2], "b": {}}))
    assert not any(
        accepts(compact, text) for text in ('{"a":[1,2]}', '{"a": [1,2]}', '{"a": [1, 2] }', '{ "a": [1, 2]}')
    )
    tabs = compiled(json=schema, whitespace_pattern="\t?")
    assert accepts(tabs, '{"a":\t[1,\t2]\t}') and accepts(tabs, '{"a":[1,2]}') and not accepts(tabs, '{"a": [1,2]}')


def test_digits_of_a_regex_are_those_of_unicode_as_in_python_and_those_of_a_schema_are_ascii():
    for pattern, letter in ((r"\d", "٣"), (r"\w", "é"), (r"\s", "\u2003")):
        assert re.fullmatch(pattern, letter) and accepts(compiled(regex=pattern), letter)
    assert not accepts(compiled(json={"type": "string", "pattern": r"^\d$"}), '"٣"')


def test_a_regex_matches_the_whole_output_or_nothing():
    automaton = compiled(regex="ab|c")
    assert [accepts(automaton, text) for text in ("ab", "c", "abc", "a", "xab", "abx")] == [True] * 2 + [False] * 4


def test_a_context_free_grammar_counts():
    automaton = compiled(grammar='start: "(" start ")" | "x"')
    assert accepts(automaton, "x") and accepts(automaton, "((x))")
    assert not accepts(automaton, "((x)") and not accepts(automaton, "(x))")


def test_dates_are_of_the_calendar_but_for_leap_days():
    """A known limit: every year may have a leap day."""
    automaton = compiled(json={"type": "string", "format": "date"})
    days = ("2024-02-29", "2023-12-31", "2023-02-29", "2023-02-30", "2023-04-31", "2023-13-01")
    assert [accepts(automaton, f'"{day}"') for day in days] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a": 1}'),
        ({"json": True}, "[1]"),
        ({"json_object": True}, "{}"),
        ({"regex": "[a-z]+!"}, "yes!"),
        ({"choice": ["yes", "no"]}, "no"),
        ({"grammar": 'start: "x" B\nB: /[0-9]+/'}, "x12"),
    ],
)
def test_reasoning_before_an_answer_is_free(given, answer):
    within = compiled(**given, reasoning_tags=("", "</think>"))
    perhaps = compiled(**given, reasoning_tags=("<think>", "</think>"))
    thought = 'so {</thin "x"'
    for space in ("", "\n\n"):
        assert accepts(within, f"{thought}</think>{space}{answer}")
        assert accepts(perhaps, f"<think>{thought}</think>{space}{answer}")
        assert not accepts(within, f"{thought}</think>{space}?{answer}")
    assert accepts(perhaps, answer) and not accepts(within, answer)
    assert not accepts(perhaps, f"{thought}</think>{answer}") and not accepts(within, f"{thought}</think>")
    assert EOS not in on(within, after(within, answer))
