"""200 schemas: whatever is drawn from the masks alone parses and validates, cut texts once they are completed."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from tests.constraints.guided import compiled, completion, random_walk, text_of

FILES = sorted((Path(__file__).parent / "schemas").glob("*.json"))
SCHEMAS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
OPTIONS = ({}, {"disable_any_whitespace": True}, {"whitespace_pattern": "[ ]?"})
# Keywords that restrict values or say where to find what does.
KEYWORDS = {
    "type", "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    "enum", "const", "$ref", "$defs", "definitions", "$anchor", "$id", "anyOf", "oneOf", "allOf", "items",
    "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
Validator = jsonschema.Draft202012Validator


def mistakes(automaton, schema, seeds):
    """Texts that a random walk wrote, or began and closing tokens completed, which the schema does not allow."""
    found = []
    for seed in seeds:
        tokens, state = random_walk(automaton, seed, most=200)
        if not automaton.is_final(state):
            tokens = tokens + completion(automaton, state, text_of(tokens))
        text = text_of(tokens).decode()
        # Any minute may end with a leap second, where the checker expects it at 23:59 only.
        value = json.loads(re.sub(r"(\d\d:\d\d):60", r"\1:59", text))
        errors = list(Validator(schema, format_checker=Validator.FORMAT_CHECKER).iter_errors(value))
        found += [(text, error.message) for error in errors]
    return found


def all_mistakes(name, seeds):
    found = []
    for index, schema in enumerate(SCHEMAS[name]):
        Validator.check_schema(schema)
        found += mistakes(compiled(json=schema, **OPTIONS[index % 3]), schema, seeds)
    return found


def words_of(value, keyword=None):
    """Dict keys of a schema, and the formats that it names."""
    if isinstance(value, dict):
        yield from value
        for key, inner in value.items():
            yield from words_of(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from words_of(inner)
    elif keyword == "format":
        yield value


def test_there_are_two_hundred_schemas_with_every_keyword_and_format_that_is_supported():
    texts = {json.dumps(schema) for schemas in SCHEMAS.values() for schema in schemas}
    words = {word for schemas in SCHEMAS.values() for schema in schemas for word in words_of(schema)}
    assert len(texts) >= 200 and words >= KEYWORDS | FORMATS


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_from_the_masks_parses_and_validates(name):
    assert all_mistakes(name, seeds=range(2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_from_the_masks_in_many_walks_parses_and_validates(name):
    assert all_mistakes(name, seeds=range(2, 20)) == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_few_walks_of_a_file_are_cut_and_few_come_to_an_end_at_once(name):
    ended = [
        (len(tokens), automaton.is_final(state))
        for automaton in [compiled(json=schema, **OPTIONS[n % 3]) for n, schema in enumerate(SCHEMAS[name])]
        for tokens, state in [random_walk(automaton, 0, most=200)]
    ]
    assert sum(is_final for _, is_final in ended) >= len(ended) / 3
    assert sum(length for length, _ in ended) >= 2 * len(ended)


@pytest.mark.parametrize(
    ("written", "schema"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 99}, {"type": "integer", "minimum": 0, "maximum": 9}),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 5}, {"type": "array", "maxItems": 1}),
        ({"enum": ["a", "b", "c"]}, {"enum": ["a", "b"]}),
    ],
)
def test_masks_of_a_grammar_that_allows_more_are_found_out(written, schema):
    assert mistakes(compiled(json=written), schema, seeds=range(10)) != []
