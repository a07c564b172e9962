"""Conversations of `/v1/chat/completions` in the words of the other endpoints of conversations."""

from __future__ import annotations

import json
from typing import Any

from soaking.answers import MESSAGES, RESPONSES
from soaking.asked import Asked

_CHOICES = {"auto": "auto", "required": "any"}


def as_message(asked: Asked) -> Asked:
    """Ask it in the words of Anthropic's API, whose answers have no tokens."""
    body: dict[str, Any] = {}
    for name, value in asked.body.items():
        match name:
            case "messages":
                body |= _with_system([_turn(message) for message in value], "system", "messages")
            case "stop":
                body["stop_sequences"] = value
            case "tools":
                body["tools"] = [_message_tool(**tool["function"]) for tool in value]
            case "tool_choice":
                is_single = not asked.body["parallel_tool_calls"]
                body["tool_choice"] = {"type": _CHOICES[value], "disable_parallel_tool_use": is_single}
            case "response_format":
                schema = value["json_schema"]["schema"]
                body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
            case "parallel_tool_calls" | "return_token_ids":
                pass
            case _:
                body[name] = value
    return asked._replace(path=MESSAGES, body=body, offline=asked.offline | {"surface": "messages"})


def as_response(asked: Asked, *, is_stored: bool = True, with_tokens: bool = False) -> Asked:
    """Ask it in the words of OpenAI's responses.

    Args:
        is_stored: whether the server is to remember the answer.
        with_tokens: ask for log probabilities, whose tokens are ids.
    """
    body: dict[str, Any] = {} if is_stored else {"store": False}
    for name, value in asked.body.items():
        match name:
            case "messages":
                body |= _with_system([item for message in value for item in _items(message)], "instructions", "input")
            case "max_tokens":
                body["max_output_tokens"] = value
            case "tools":
                body["tools"] = [{"type": "function", **tool["function"]} for tool in value]
            case "response_format":
                body["text"] = {"format": {"type": "json_schema", **value["json_schema"]}}
            case "return_token_ids":
                pass
            case _:
                body[name] = value
    if with_tokens:
        body |= {"include": ["message.output_text.logprobs"], "return_tokens_as_token_ids": True}
    offline = asked.offline | {"surface": "responses", "has_tokens": with_tokens}
    return asked._replace(path=RESPONSES, body=body, offline=offline)


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message of Anthropic's: calls and their results are blocks."""
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [result]}
    if "tool_calls" not in message:
        return message
    functions = [(call["id"], call["function"]) for call in message["tool_calls"]]
    blocks = [
        {"type": "tool_use", "id": name, "name": function["name"], "input": json.loads(function["arguments"])}
        for name, function in functions
    ]
    return {"role": "assistant", "content": blocks}


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Items of responses: calls and their results are items."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    if "tool_calls" not in message:
        return [message]
    return [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in message["tool_calls"]]


def _with_system(messages: list[dict[str, Any]], system: str, others: str) -> dict[str, Any]:
    """Messages, with the first one apart if it is the system's."""
    if messages[0].get("role") != "system":
        return {others: messages}
    return {system: messages[0]["content"], others: messages[1:]}


def _message_tool(name: str, parameters: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    more = {} if description is None else {"description": description}
    return {"name": name, **more, "input_schema": parameters}
