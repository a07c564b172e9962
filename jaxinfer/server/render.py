"""The `/render` forms of endpoints: what a request is in tokens, for routers that look for cached prefixes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.bodies import read_body, read_body_as
from jaxinfer.server.chat_request import AskedChat
from jaxinfer.server.completion_request import AskedCompletions
from jaxinfer.server.errors import ApiError
from jaxinfer.server.events import Reply
from jaxinfer.server.messages_request import chat_request_of
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.common import Sampling
from jaxinfer.server.protocol.completions import CompletionRequest
from jaxinfer.server.protocol.messages import MessagesRequest
from jaxinfer.server.service import Service

# What is more than one request of the engine for each prompt.
_NOT_ONE = ("use_beam_search", "branches", "skeleton_of_thought")


class Asked(Protocol):
    """What was asked for and checked: `AskedChat` and `AskedCompletions`."""

    service: Service
    body: Any
    params: SamplingParams

    @property
    def prompts(self) -> list[dict[str, Any]]: ...


class Render:
    """Handlers of the `/render` forms."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: HttpRequest) -> App:
        body = await read_body(self._service, request, ChatRequest)
        return Reply(rendered(request, "chatcmpl", await AskedChat.read(self._service, body))[0])

    async def completions(self, request: HttpRequest) -> App:
        body = await read_body(self._service, request, CompletionRequest)
        return Reply(rendered(request, "cmpl", await AskedCompletions.read(self._service, body)))

    async def messages(self, request: HttpRequest) -> App:
        body = await read_body_as(self._service, request, MessagesRequest, chat_request_of)
        return Reply(rendered(request, "msg", await AskedChat.read(self._service, body))[0])


def rendered(request: HttpRequest, prefix: str, asked: Asked) -> list[dict[str, Any]]:
    """What was asked for, in tokens, for each prompt.

    Args:
        prefix: of the ids.

    Raises:
        ApiError: it is not one request for each prompt.
    """
    body: Sampling = asked.body
    if field := next((name for name in _NOT_ONE if getattr(body, name, None)), None):
        raise ApiError(400, f"{field} goes without render: it is more than one request", field)
    most, names = asked.service.llm.config.max_model_len, asked.service.model_names
    stream = bool(body.stream)
    options = body.stream_options if stream else None
    return [
        {
            "request_id": f"{prefix}-{request.scope['request_id']}-{number}",
            "token_ids": prompt["prompt_token_ids"],
            "sampling_params": _parameters(asked.params, most - len(prompt["prompt_token_ids"])),
            "model": body.model or names[0],
            "stream": stream,
            "stream_options": None if options is None else options.model_dump(exclude_none=True),
            "cache_salt": body.cache_salt,
            "priority": body.priority or 0,
        }
        for number, prompt in enumerate(asked.prompts)
    ]


def _parameters(params: SamplingParams, room: int) -> dict[str, Any]:
    """Sampling parameters by their names, with as many tokens as there is room for."""
    found = {each.name: getattr(params, each.name) for each in fields(params) if each.init}
    found["max_tokens"] = room if params.max_tokens is None else min(params.max_tokens, room)
    structured = params.structured_outputs
    if isinstance(structured, StructuredOutputsParams):
        given = {each.name: getattr(structured, each.name) for each in fields(structured)}
        found["structured_outputs"] = {name: value for name, value in given.items() if value not in (None, False)}
    return found
