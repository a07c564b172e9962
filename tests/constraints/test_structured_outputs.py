"""What a request may ask for: one grammar, checked by field and value before anything is compiled."""

import json
import re

import pytest

import jaxinfer
from jaxinfer.constraints.schema_text import MAX_GRAMMAR_BYTES, MAX_SCHEMA_DEPTH
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.sampling_params import SamplingParams


class Book:
    """A model like Pydantic's, without it."""

    @classmethod
    def model_json_schema(cls):
        return {"title": "Book", "type": "object", "properties": {"pages": {"type": "integer"}}}


CYCLIC: dict = {}
CYCLIC["properties"] = CYCLIC
DOUBLED: dict = {}
for _ in range(40):
    DOUBLED = {"a": DOUBLED, "b": DOUBLED}


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


BAD = [
    ({}, "structured_outputs must have exactly one of json, regex, choice, grammar, json_object, got none of them"),
    ({"json_object": False}, "got none of them"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"json": False, "regex": "a"}, "got json and regex"),
    ({"json_object": 1}, "structured_outputs.json_object must be True, False or None, got 1"),
    ({"regex": ""}, "structured_outputs.regex must be a non-empty string, got ''"),
    ({"regex": 5}, "structured_outputs.regex must be a non-empty string, got 5"),
    ({"regex": False}, "structured_outputs.regex must be a non-empty string, got False"),
    ({"regex": "\ud800"}, "structured_outputs.regex is not valid Unicode"),
    ({"grammar": ""}, "structured_outputs.grammar must be a non-empty string, got ''"),
    ({"grammar": b"start: x"}, "structured_outputs.grammar must be a non-empty string"),
    ({"choice": []}, r"structured_outputs.choice must be a non-empty list of strings, got \[\]"),
    ({"choice": "ab"}, "structured_outputs.choice must be a non-empty list of strings, got 'ab'"),
    ({"choice": ["a", ""]}, "structured_outputs.choice must hold non-empty strings, got ''"),
    ({"choice": ["a", 1]}, "structured_outputs.choice must hold non-empty strings, got 1"),
    ({"choice": ["a", "b", "a"]}, "structured_outputs.choice must hold each text once, got 'a' twice"),
    ({"json": 5}, "structured_outputs.json must be a JSON schema: .*, got 5"),
    ({"json": int}, "structured_outputs.json must be a JSON schema: .*, got <class 'int'>"),
    ({"json": [{}]}, r"structured_outputs.json must be a JSON schema: .*, got \[\{\}\]"),
    ({"json": "[1]"}, r"structured_outputs.json must be the text of an object or a bool, got '\[1\]'"),
    ({"json": "{"}, "structured_outputs.json must be JSON: "),
    ({"json": '{"a": NaN}'}, "structured_outputs.json must be JSON: NaN is not JSON"),
    ({"json": 'true }, {"lark_grammar": "start: /x/" '}, "structured_outputs.json must be JSON: Extra data"),
    ({"json": {1: {}}}, "structured_outputs.json must have strings as keys, got 1"),
    ({"json": {"enum": [{1}]}}, r"structured_outputs.json must hold JSON values only, got \{1\}"),
    ({"json": {"const": float("inf")}}, "structured_outputs.json must hold JSON values only: "),
    ({"json": {"const": "\udfff"}}, "structured_outputs.json is not valid Unicode"),
    ({"json": {"x-guidance": {"lenient": True}}}, "structured_outputs.json must not have the keyword 'x-guidance'"),
    *(
        (
            {"json": {"anyOf": [{"multipleOf": given}]}},
            f"structured_outputs.json: multipleOf {given} has too many digits",
        )
        for given in (99999989, 50001, 0.123456)
    ),
    ({"json": nested(65)}, "structured_outputs.json must have at most 64 levels, got more"),
    ({"json": nested(300)}, "structured_outputs.json must have at most 64 levels, got more"),
    ({"json": json.dumps(nested(300))}, "structured_outputs.json must have at most 64 levels, got more"),
    ({"json": "[" * 60_000}, "structured_outputs.json must have at most 64 levels, got more"),
    ({"json": CYCLIC}, "structured_outputs.json must have at most 64 levels, got more"),
    ({"json": DOUBLED}, "structured_outputs.json must have at most 65536 bytes, got more"),
    ({"json": {"description": "x" * 65_536}}, "structured_outputs.json must have at most 65536 bytes, got 65555"),
    ({"json": " " * 65_535 + "{}"}, "structured_outputs.json must have at most 65536 bytes, got 65537"),
    ({"regex": "é" * 32_769}, "structured_outputs.regex must have at most 65536 bytes, got 65538"),
    ({"grammar": "x" * 65_537}, "structured_outputs.grammar must have at most 65536 bytes, got 65537"),
    ({"choice": ["x" * 65_536]}, "structured_outputs.choice must have at most 65536 bytes, got 65540"),
    (
        {"json": {}, "whitespace_pattern": ""},
        "structured_outputs.whitespace_pattern must be a non-empty string or None",
    ),
    (
        {"json": {}, "disable_any_whitespace": 1},
        "structured_outputs.disable_any_whitespace must be True or False, got 1",
    ),
    (
        {"json": {}, "disable_additional_properties": None},
        "structured_outputs.disable_additional_properties must be True or False, got None",
    ),
    (
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "structured_outputs.whitespace_pattern=' ' and disable_any_whitespace=True exclude each other",
    ),
    (
        {"regex": "a", "whitespace_pattern": " "},
        "structured_outputs.whitespace_pattern=' ' applies to json and json_object, got regex",
    ),
    (
        {"choice": ["a"], "disable_any_whitespace": True},
        "structured_outputs.disable_any_whitespace=True applies to json and json_object, got choice",
    ),
    (
        {"json_object": True, "disable_additional_properties": True},
        "structured_outputs.disable_additional_properties=True applies to json, got json_object",
    ),
    *(
        ({"regex": "a", "reasoning_tags": tags}, "structured_outputs.reasoning_tags must be two strings, the second")
        for tags in ("</think>", ["</think>"], ("<think>", ""), ("", 1))
    ),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_bad_value_is_refused_by_field_and_value(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        StructuredOutputsParams(**given)
    assert str(caught.value).startswith("structured_outputs") and len(str(caught.value)) < 500


def test_a_schema_may_have_sixty_four_levels_and_sixty_four_kilobytes():
    assert (MAX_SCHEMA_DEPTH, MAX_GRAMMAR_BYTES) == (64, 65_536)
    assert StructuredOutputsParams(json=nested(64)).json == nested(64)
    most = {"description": "x" * (MAX_GRAMMAR_BYTES - len('{"description": ""}'))}
    assert len(StructuredOutputsParams(json=most).text) == MAX_GRAMMAR_BYTES


def test_a_schema_in_any_of_its_forms_is_the_same():
    schema = {"title": "Book", "type": "object", "properties": {"pages": {"type": "integer"}}}
    forms = [
        StructuredOutputsParams(json=form) for form in (schema, json.dumps(schema), json.dumps(schema, indent=4), Book)
    ]
    assert len(set(forms)) == 1 and all(form.json == schema for form in forms)
    assert {StructuredOutputsParams(json=True).text, StructuredOutputsParams(json="true").text} == {"true"}


def test_schemas_with_their_properties_in_another_order_are_others():
    one = StructuredOutputsParams(json={"properties": {"a": {}, "b": {}}})
    other = StructuredOutputsParams(json={"properties": {"b": {}, "a": {}}})
    assert one.json == other.json and one.key != other.key and one != other and len({one, other}) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"regex": "a"}, {"grammar": "a"}),
        ({"json": {}}, {"json": {}, "whitespace_pattern": " "}),
        ({"json": {}}, {"json": {}, "disable_any_whitespace": True}),
        ({"json": {"properties": {}}}, {"json": {"properties": {}}, "disable_additional_properties": True}),
        ({"choice": ["a", "b"]}, {"choice": ["b", "a"]}),
        ({"choice": ["a, b"]}, {"choice": ["a", "b"]}),
    ],
)
def test_grammars_that_may_differ_have_different_keys(one, other):
    assert StructuredOutputsParams(**one).key != StructuredOutputsParams(**other).key
    assert StructuredOutputsParams(**one) == StructuredOutputsParams(**one)


def test_a_schema_that_is_changed_later_changes_nothing():
    schema = {"type": "object", "properties": {"a": {}}}
    params = StructuredOutputsParams(json=schema)
    schema["properties"]["b"] = {}
    assert params.json == {"type": "object", "properties": {"a": {}}} == json.loads(params.text)


def test_schemas_with_properties_are_closed_where_they_do_not_say_and_nothing_else_is():
    schema = {
        "properties": {
            "properties": {"type": "string"},
            "open": {"properties": {"x": {}}, "additionalProperties": True},
            "list": {"items": {"patternProperties": {"^a": {"properties": {}}}}},
        },
        "$defs": {"d": {"anyOf": [{"properties": {"y": {"type": "object"}}}, {"prefixItems": [{"properties": {}}]}]}},
        "enum": [{"properties": {}}],
    }
    closed = StructuredOutputsParams(json=schema, disable_additional_properties=True).json
    no = {"additionalProperties": False}
    assert closed == {
        "properties": {
            "properties": {"type": "string"},
            "open": {"properties": {"x": {}}, "additionalProperties": True},
            "list": {"items": {"patternProperties": {"^a": {"properties": {}, **no}}, **no}},
        },
        "$defs": {
            "d": {
                "anyOf": [{"properties": {"y": {"type": "object"}}, **no}, {"prefixItems": [{"properties": {}, **no}]}]
            }
        },
        "enum": [{"properties": {}}],
        **no,
    }


def test_sampling_params_take_the_parameters_or_their_arguments():
    params = StructuredOutputsParams(choice=["yes", "no"])
    assert SamplingParams(structured_outputs=params).structured_outputs is params
    made = SamplingParams(structured_outputs={"choice": ("yes", "no")})
    assert made.structured_outputs == params and made == SamplingParams(structured_outputs=params)
    assert SamplingParams().structured_outputs is None
    assert jaxinfer.StructuredOutputsParams is StructuredOutputsParams


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"schema": {}}, "structured_outputs has no field 'schema'; it has json, regex, choice, grammar, json_object"),
        ({"structural_tag": "{}"}, "structured_outputs has no field 'structural_tag'"),
        ({"regex": ""}, "structured_outputs.regex must be a non-empty string, got ''"),
        ("[a-z]", "structured_outputs must be a StructuredOutputsParams or a dict, got '[a-z]'"),
        (True, "structured_outputs must be a StructuredOutputsParams or a dict, got True"),
    ],
)
def test_sampling_params_refuse_what_is_neither(value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(structured_outputs=value)
