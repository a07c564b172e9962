"""Conversations of requests as prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.server.errors import ApiError
from jaxinfer.server.json_text import finite_float, refuse_constant
from jaxinfer.server.service import Service

# Fields that would change the prompt, and why they are not served.
REFUSED_OF_CONVERSATIONS = (("add_special_tokens", "the chat template writes the special tokens"),)
# What a request must not say about how a template is read.
_NOT_OF_TEMPLATES = (
    "chat_template", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "padding", "truncation", "max_length", "conversation", "messages", "self",
)  # fmt: skip


def tokens_of_messages(
    service: Service,
    messages: Sequence[Any],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    tools: Sequence[Any] | None = None,
    reasoning_effort: str | None = None,
) -> list[int]:
    """The tokens of a conversation, by the model's chat template. A thread beside the event loop calls it.

    Args:
        reasoning_effort: "none" switches reasoning off where the template reads `enable_thinking`, others switch it on.

    Raises:
        ApiError: the arguments do not go together.
        ValueError: the template refuses the messages.
    """
    arguments = dict(chat_template_kwargs or {})
    if any(name in arguments for name in _NOT_OF_TEMPLATES):
        raise ApiError(
            400, f"chat_template_kwargs must have none of {', '.join(_NOT_OF_TEMPLATES)}", "chat_template_kwargs"
        )
    if continue_final_message and add_generation_prompt:
        raise ApiError(400, "continue_final_message goes with add_generation_prompt=false", "continue_final_message")
    if reasoning_effort is not None:
        template = service.template()
        asked = {"enable_thinking": reasoning_effort != "none", "reasoning_effort": reasoning_effort}
        arguments = {name: value for name, value in asked.items() if name in template} | arguments
    if documents:
        arguments["documents"] = list(documents)
    if tools:
        # Models have learnt nothing of `strict`: it says how answers are drawn.
        without = {"function": {"strict"}}
        arguments["tools"] = [tool.model_dump(exclude_none=True, exclude=without) for tool in tools]
    if continue_final_message:
        arguments |= {"continue_final_message": True, "add_generation_prompt": False}
    elif add_generation_prompt is not None:
        arguments["add_generation_prompt"] = add_generation_prompt
    return service.llm.render([_message(message) for message in messages], **arguments)["prompt_token_ids"]


def _message(message: Any) -> dict[str, Any]:
    """A message as a template reads it: nulls are left out, arguments are objects, and a developer is a system."""
    found = {name: value for name, value in message.model_dump().items() if value is not None}
    if found["role"] == "developer":
        found["role"] = "system"
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    elif content is None:
        found["content"] = ""
    if found.get("function_call"):
        raise ApiError(400, "function_call of a message is not served: use tool_calls", "messages")
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
    thought = found.get("reasoning_content") or found.get("reasoning")
    if thought:
        found["reasoning_content"] = thought
    return found


def _call(given: Any) -> dict[str, Any]:
    """A call of an earlier answer, whose arguments come as the text of a JSON object."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "tool_calls must be {'id', 'type', 'function': {'name', 'arguments'}}", "messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=refuse_constant, parse_float=finite_float)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"arguments of {function['name'][:64]} are not JSON: {error}", "messages") from error
    if not isinstance(arguments, dict):
        raise ApiError(400, f"arguments of {function['name'][:64]} must be a JSON object", "messages")
    return {**given, "type": "function", "function": {**function, "arguments": arguments}}
