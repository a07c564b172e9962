"""Tools and thinking through Anthropic's client: forced calls, loops of calls and results, and thinking turned off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.server.processes import SMALL, Server, serving
from tests.server.talking import write_talking
from tests.server.test_tools import SCHEMA

TEMPLATE = """{%- if tools %}{{- '<|system|>Tools: ' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- ' Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|user|><tool_response>' + message.content + '</tool_response><|end|>' }}
{%- else %}{{- '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}{%- set function = call.function %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' + (function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}{{- '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
# As Qwen's templates have it: thinking is turned off by an empty one, which the template writes.
THINKING = TEMPLATE.replace("{{- '<|assistant|>' }}", "{{- '<|assistant|>' }}{{- tail }}").replace(
    "{%- if tools %}",
    "{%- set tail = '' if enable_thinking is not defined else '<think>\n' if enable_thinking"
    " else '<think>\n\n</think>\n\n' %}{%- if tools %}",
    1,
)
WEATHER = {"name": "weather", "description": "the weather", "input_schema": SCHEMA}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
QUESTION = [{"role": "user", "content": "How is the weather?"}]
GIVEN: dict[str, Any] = {
    "model": "tiny", "max_tokens": 120, "tools": [WEATHER, NOW], "extra_body": {"temperature": 0.7, "seed": 3},
}  # fmt: skip
# With tags that no answer has, the grammar holds for reasoning too.
THOUGHT = {"structured_outputs": {"regex": "[a-z]{4}</think>\n\n[a-z]{5}", "reasoning_tags": ["<none>", "</none>"]}}


@pytest.fixture(scope="module")
def talking(tmp_path_factory) -> Iterator[Server]:
    """A server of the embedded weights with a chat template that has tools and thinking."""
    directory = tmp_path_factory.mktemp("with thinking") / "tiny"
    write_talking(directory, THINKING)
    with serving(str(directory), *SMALL, "--served-model-name", "tiny") as found:
        yield found


@pytest.fixture
def client(talking):
    return anthropic.Anthropic(base_url=talking.url, api_key="none", max_retries=0)


def prompt(talking: Server, **given: Any) -> str:
    """The text of the prompt that a request becomes."""
    tokens = talking.json("POST", "/v1/messages/render", {"max_tokens": 9, "messages": QUESTION, **given})["token_ids"]
    return talking.json("POST", "/detokenize", {"tokens": tokens})["prompt"]


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "tool", "name": "now"}]
)
def test_a_call_that_is_forced_is_the_answer(client, choice):
    choice = choice | {"disable_parallel_tool_use": True}
    headers = {"X-Request-Id": "call"}
    whole = client.messages.create(messages=QUESTION, **GIVEN, tool_choice=choice, extra_headers=headers)
    (call,) = whole.content
    assert whole.stop_reason == "tool_use" and call.type == "tool_use" and call.name == choice.get("name", call.name)
    jsonschema.validate(call.input, {"weather": WEATHER, "now": NOW}[call.name]["input_schema"])
    with client.messages.stream(messages=QUESTION, **GIVEN, tool_choice=choice, extra_headers=headers) as stream:
        events = list(stream)
        found = stream.get_final_message()
    assert [block.to_dict() for block in found.content] == [block.to_dict() for block in whole.content]
    assert found.stop_reason == "tool_use"
    parts = [event.partial_json for event in events if event.type == "input_json"]
    assert json.loads("".join(parts)) == call.input and all(parts)


def test_a_call_that_is_cut_has_what_is_there(client):
    given = GIVEN | {"max_tokens": 26, "tool_choice": {"type": "tool", "name": "weather"}}
    whole = client.messages.create(messages=QUESTION, **given)
    with client.messages.stream(messages=QUESTION, **given) as stream:
        found = stream.get_final_message()
    assert whole.stop_reason == found.stop_reason == "max_tokens" and whole.content[0].type == "tool_use"
    assert found.content[0].input == whole.content[0].input and set(whole.content[0].input) < {"city", "days"}


def test_calls_and_results_make_a_conversation(client, talking):
    given = GIVEN | {"tool_choice": {"type": "tool", "name": "weather"}}
    answer = client.messages.create(messages=QUESTION, **given)
    (call,) = answer.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": False}
    failed = {"type": "tool_result", "tool_use_id": call.id, "content": "no clock", "is_error": True}
    messages = [*QUESTION, answer.to_param(), {"role": "user", "content": [result, failed]}]
    assert client.messages.create(messages=messages, **GIVEN).content
    text = prompt(
        talking,
        tools=GIVEN["tools"],
        messages=[*messages[:1], {"role": "assistant", "content": [call.to_dict()]}, messages[2]],
    )
    written = json.dumps(call.input, ensure_ascii=False)
    assert f'<tool_call>{{"name": "weather", "arguments": {written}}}</tool_call><|end|>' in text
    assert text.endswith(
        "<tool_response>sunny</tool_response><|end|><|user|><tool_response>Error: no clock</tool_response><|end|>"
        "<|assistant|>"
    )


def test_tools_that_must_not_be_called_are_not_named(client, talking):
    with_tools = {"tools": GIVEN["tools"], "tool_choice": {"type": "auto"}}
    assert "the weather" in prompt(talking, **with_tools)
    assert "Tools:" not in prompt(talking, **with_tools | {"tool_choice": {"type": "none"}})
    answer = client.messages.create(messages=QUESTION, **GIVEN, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]


def test_tokens_are_counted_with_tools_and_thinking(client):
    for given in (
        {"tools": GIVEN["tools"]},
        {"tools": GIVEN["tools"], "tool_choice": {"type": "none"}},
        {"tools": GIVEN["tools"], "tool_choice": {"type": "any"}, "system": "Be brief."},
        {"thinking": {"type": "disabled"}},
    ):
        usage = client.messages.create(messages=QUESTION, **GIVEN | {"tools": [], "max_tokens": 40} | given).usage
        counted = client.messages.count_tokens(model="tiny", messages=QUESTION, **given)
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_thinking_is_a_block_of_its_own(client):
    given = {
        "model": "tiny", "max_tokens": 40, "messages": QUESTION, "extra_body": {"temperature": 0, **THOUGHT},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    whole = client.messages.create(**given)
    thinking, text = whole.content
    assert thinking.type == "thinking" and len(thinking.thinking) == 4 and thinking.signature == ""
    assert text.type == "text" and len(text.text) == 5
    with client.messages.stream(**given) as stream:
        types = [event.type for event in stream]
        found = stream.get_final_message()
    assert [block.to_dict() for block in found.content] == [block.to_dict() for block in whole.content]
    assert types.index("thinking") < types.index("signature") < types.index("text")
    hidden = client.messages.create(**given | {"thinking": {"type": "adaptive", "display": "omitted"}})
    assert [block.to_dict() for block in hidden.content] == [text.to_dict()]


def test_thinking_that_is_disabled_is_neither_asked_for_nor_shown(client, talking):
    assert prompt(talking, thinking={"type": "enabled", "budget_tokens": 9}).endswith("<|assistant|><think>\n")
    assert prompt(talking, thinking={"type": "disabled"}).endswith("<|assistant|><think>\n\n</think>\n\n")
    assert prompt(talking).endswith("<|assistant|>")
    given = {"model": "tiny", "max_tokens": 40, "messages": QUESTION, "thinking": {"type": "disabled"}}
    extra = {"temperature": 0, "structured_outputs": {"regex": "<think>[a-z]{4}</think>[a-z]{5}"}}
    (block,) = client.messages.create(**given, extra_body=extra).content
    assert block.type == "text" and len(block.text) == 5
