"""Answers by channels over HTTP: calls that keep to schemas, answers that are JSON, and text, for every endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.server.harmony import token_of, write_with_channels
from tests.server.processes import SMALL, Server, serving
from tests.server.test_tools import NOW, SCHEMA, WEATHER

# A model that knows no channels would reason to its end: it is led to end messages wherever it may.
LED = {str(token_of("<|end|>")): 100}
GIVEN: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "How is the weather?"}], "temperature": 0.7, "seed": 3,
    "max_tokens": 160, "logit_bias": LED,
}  # fmt: skip


@pytest.fixture(scope="module")
def channels(tmp_path_factory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("channels") / "tiny"
    write_with_channels(directory)
    with serving(str(directory), *SMALL, "--served-model-name", "tiny") as found:
        yield found
        assert found.is_idle()


@pytest.fixture
def client(channels):
    return openai.OpenAI(base_url=f"{channels.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_required_keeps_to_its_schema_whole_and_streamed(client, seed):
    given = GIVEN | {"tools": [WEATHER], "tool_choice": "required", "seed": seed}
    (found,) = client.chat.completions.create(**given).choices
    (call,) = found.message.tool_calls
    assert call.function.name == "weather" and found.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    with client.chat.completions.stream(**given) as stream:
        again = stream.get_final_completion().choices[0]
    assert again.message.tool_calls[0].function.arguments == call.function.arguments


def test_the_result_of_a_call_continues_the_conversation(client):
    given = GIVEN | {"tools": [NOW], "tool_choice": "required"}
    (call,) = client.chat.completions.create(**given).choices[0].message.tool_calls
    assert call.function.arguments == "{}"
    messages = [
        *GIVEN["messages"], {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]  # fmt: skip
    found = client.chat.completions.create(**GIVEN | {"messages": messages, "tools": [NOW]}).choices[0]
    assert "<|" not in (found.message.content or "")


def test_an_answer_with_a_schema_is_json_without_its_channel(client):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    for more in ({}, {"tools": [WEATHER]}):
        (found,) = client.chat.completions.create(**GIVEN, response_format=form, **more).choices
        if not found.message.tool_calls:
            jsonschema.validate(json.loads(found.message.content), SCHEMA)


def test_other_endpoints_see_the_same_call(channels, client):
    chat = GIVEN | {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 160}
    wanted = client.chat.completions.create(**chat).choices[0].message.tool_calls[0].function.arguments
    response = client.responses.create(
        model="tiny", input=GIVEN["messages"], temperature=0.7, max_output_tokens=160, tool_choice="required",
        tools=[{"type": "function", **WEATHER["function"]}], extra_body={"seed": 3, "logit_bias": LED},
    )  # fmt: skip
    (item,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(item.arguments) == json.loads(wanted)
    other = anthropic.Anthropic(base_url=channels.url, api_key="none", max_retries=0)
    message = other.messages.create(
        model="tiny", messages=GIVEN["messages"], max_tokens=160, tool_choice={"type": "any"},
        tools=[{"name": "weather", "description": "the weather", "input_schema": SCHEMA}],
        extra_body={"temperature": 0.7, "seed": 3, "logit_bias": LED},
    )  # fmt: skip
    (block,) = [block for block in message.content if block.type == "tool_use"]
    jsonschema.validate(block.input, SCHEMA)
