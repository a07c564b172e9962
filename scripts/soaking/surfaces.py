"""Conversations of `/v1/chat/completions` in the words of the other endpoints of conversations."""

from __future__ import annotations

from typing import Any

from soaking.answers import MESSAGES, RESPONSES
from soaking.asked import Asked

_CHOICES = {"auto": "auto", "required": "any"}


def as_message(asked: Asked) -> Asked:
    """The same as Anthropic's API asks it. Its answer has no tokens."""
    body: dict[str, Any] = {}
    for name, value in asked.body.items():
        match name:
            case "messages":
                body |= _with_system(value, "system", "messages")
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
    """The same as OpenAI's newer API asks it.

    Args:
        is_stored: whether the server is to remember the answer.
        with_tokens: ask for log probabilities, whose tokens are ids.
    """
    body: dict[str, Any] = {} if is_stored else {"store": False}
    for name, value in asked.body.items():
        match name:
            case "messages":
                body |= _with_system(value, "instructions", "input")
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


def _with_system(messages: list[dict[str, Any]], system: str, others: str) -> dict[str, Any]:
    """Messages, with the first one apart if it is the system's."""
    if messages[0]["role"] != "system":
        return {others: messages}
    return {system: messages[0]["content"], others: messages[1:]}


def _message_tool(name: str, parameters: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    more = {} if description is None else {"description": description}
    return {"name": name, **more, "input_schema": parameters}
