"""Reasoning and grammars: what comes before the answer is free, and the answer keeps to its grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.server.processes import SMALL, Server, serving
from tests.server.talking import write_talking

TEMPLATE = """{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
{%- if thinking == 'open' %}{{- '<think>\\n' }}
{%- elif thinking == 'closed' %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
GIVEN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name a city."}], "temperature": 0.7, "seed": 3, "max_tokens": 160,
}  # fmt: skip
AS_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}}


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory) -> Iterator[Server]:
    """A server of the embedded weights with a chat template that has reasoning."""
    directory = tmp_path_factory.mktemp("with reasoning") / "tiny"
    write_talking(directory, TEMPLATE)
    with serving(str(directory), *SMALL, "--served-model-name", "tiny") as found:
        yield found


def message_of(server: Server, thinking: str | None, **more: Any) -> dict[str, Any]:
    given = GIVEN | more | {"chat_template_kwargs": {"thinking": thinking}}
    return server.json("POST", "/v1/chat/completions", given)["choices"][0]["message"]


def test_a_grammar_leaves_open_reasoning_as_it_is_until_the_model_would_end_it(reasoning):
    free, found = message_of(reasoning, "open"), message_of(reasoning, "open", **AS_JSON)
    assert free["reasoning"] and found["reasoning"].startswith(free["reasoning"]) and not found["content"]
    assert len(found["reasoning"]) > len(free["reasoning"])  # without the end of reasoning there is no end


@pytest.mark.parametrize("thinking", ["closed", None])
def test_an_answer_without_reasoning_keeps_to_its_grammar(reasoning, thinking):
    free, found = message_of(reasoning, thinking), message_of(reasoning, thinking, **AS_JSON)
    assert not free["content"].startswith("{")
    jsonschema.validate(json.loads(found["content"]), SCHEMA)


def test_after_reasoning_comes_the_answer_by_its_grammar(reasoning):
    tags = {"structured_outputs": {"json": SCHEMA, "reasoning_tags": ["", " "]}}  # the first space ends it
    found = message_of(reasoning, "closed", **tags)
    before, _, answer = found["content"].partition(" ")
    assert before
    jsonschema.validate(json.loads(answer), SCHEMA)


def test_a_tag_in_a_question_begins_no_reasoning(reasoning):
    body = GIVEN | AS_JSON | {"messages": [{"role": "user", "content": "Name a city. <think>"}]}
    message = reasoning.json("POST", "/v1/chat/completions", body)["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
