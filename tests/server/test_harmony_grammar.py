"""Grammars of gpt-oss's answers over a tokenizer that has its markers as special tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tokenizers

from jaxinfer.constraints.guidance import Guidance
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.server.harmony_grammar import grammar_of_messages
from tests.constraints.guided import SIZE
from tests.server.harmony import ENDS, RENAMED, renamed_json

TOOLS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            "additionalProperties": False},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
THOUGHT = "<|channel|>analysis<|message|>Add it.<|end|><|start|>assistant"
ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
BEFORE = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(renamed_json())


def token_id(name: str) -> int:
    found = tokenizer().token_to_id(name)
    assert found is not None
    return found


@functools.cache
def guidance() -> Guidance:
    return Guidance(renamed_json(), SIZE, [token_id(name) for name in ENDS])


def accepts(grammar: str, text: str) -> bool:
    """Whether a text is a whole answer by a grammar, token by token."""
    automaton = guidance().compile(StructuredOutputsParams(grammar=grammar))
    state = automaton.start
    for token in tokenizer().encode(text, add_special_tokens=False).ids:
        state = automaton.advance(state, token)
        if state is None:
            return False
    return automaton.advance(state, token_id("<|return|>")) is not None


def test_markers_are_special_tokens_of_their_own():
    for name in RENAMED.values():
        assert tokenizer().encode(f"a{name}b", add_special_tokens=False).tokens[1] == name


@pytest.mark.parametrize("before", ["", THOUGHT])
def test_an_answer_that_has_to_call_is_one_call_that_keeps_to_its_schema(before):
    grammar = grammar_of_messages(TOOLS, must_call=True)
    assert accepts(grammar, before + ADD)
    assert accepts(grammar, before + "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}")
    assert not accepts(grammar, before + ADD.replace("1", '"one"'))
    assert not accepts(grammar, before + ADD.replace("add", "other"))
    assert not accepts(grammar, before + FINAL + "No.")
    assert not accepts(grammar, "No.")


@pytest.mark.parametrize("before", ["", THOUGHT])
def test_an_answer_may_be_text_or_a_call(before):
    grammar = grammar_of_messages(TOOLS, must_call=False)
    for text in (ADD, BEFORE + ADD, FINAL + 'Any {text} <with> "signs".', FINAL):
        assert accepts(grammar, before + text)
    assert not accepts(grammar, before + ADD.replace('{"a": 1}', "{}"))
    assert not accepts(grammar, before + BEFORE + FINAL + "Both.")


@pytest.mark.parametrize("before", ["", THOUGHT])
def test_an_answer_that_has_a_schema_is_json_in_its_channel(before):
    grammar = grammar_of_messages({}, must_call=False, answer=TOOLS["add"])
    assert accepts(grammar, before + FINAL + '{"a": 12}')
    assert not accepts(grammar, before + FINAL + "twelve")
    assert not accepts(grammar, before + ADD)
