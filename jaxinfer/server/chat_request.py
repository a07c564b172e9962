"""Conversations that were asked for, as every endpoint of conversations runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Self

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.conversations import REFUSED_OF_CONVERSATIONS, tokens_of_messages
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.packages import HttpRequest
from jaxinfer.server.parse.pieces import AnswerParser
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.common import Sampling
from jaxinfer.server.running import Running
from jaxinfer.server.sampling import refuse_uncomputed, sampling_params
from jaxinfer.server.service import Service
from jaxinfer.server.talk import Talk
from jaxinfer.server.ways import Way

_MOST_SALT = 128
_NOT_OF_CHAT = (
    ("echo", "the last message is not given back"),
    ("best_of", "use n"),
    *REFUSED_OF_CONVERSATIONS,
)


@dataclass
class AskedChat:
    """A conversation that was checked.

    Attributes:
        params: of each answer.
        tokens: the prompt's.
        talk: its tools and reasoning.
    """

    service: Service
    body: ChatRequest
    params: SamplingParams
    tokens: list[int]
    talk: Talk

    @classmethod
    async def read(cls, service: Service, body: ChatRequest) -> Self:
        """Check a body, beside the event loop.

        Raises:
            ApiError: it cannot be served.
        """
        return await asyncio.to_thread(cls._read, service, body)

    @classmethod
    def _read(cls, service: Service, body: ChatRequest) -> Self:
        llm = service.llm
        service.check_model(body.model)
        refuse_uncomputed(body, *_NOT_OF_CHAT)
        talk = Talk(service, body)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        own: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": None}
        if body.max_completion_tokens is not None:
            own["max_tokens"] = body.max_completion_tokens
        if body.logprobs:
            own["logprobs"] = body.top_logprobs or 0
        own |= talk.parameters()
        try:
            params = sampling_params(body, llm.default_sampling_params, llm.config.max_num_seqs, **own)
            tokens = tokens_of_chat(service, body, talk)
        except ValueError as error:
            refused = of_value_error(error)
            if refused.param == "logprobs":
                refused.param = "top_logprobs"
            raise refused from error
        params = talk.with_reasoning(params, tokens)
        service.check_length(len(tokens) + 1, "messages")
        return cls(service, body, params, tokens, talk)

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The one prompt, as `AsyncLLM.add` takes it."""
        return [{"prompt_token_ids": self.tokens, **salt_of(self.body)}]

    def parser(self) -> Callable[[], AnswerParser] | None:
        """A maker of parsers of answers; None: answers are text."""
        return self.talk.parser(self.tokens)

    def running(self, way: Way) -> AbstractAsyncContextManager[Running]:
        """Run it, see `Service.running`."""
        return self.service.running(self.prompts, way.num_choices, way.start, way.names)


def tokens_of_chat(service: Service, body: ChatRequest, talk: Talk) -> list[int]:
    """The tokens of a conversation with its tools. A thread beside the event loop calls it.

    Raises:
        ApiError: the body asks for what does not go together.
        ValueError: the template refuses the conversation.
    """
    return tokens_of_messages(
        service, body.messages, add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
        documents=body.documents, tools=body.tools if talk.tools.are_callable else None,
        reasoning_effort=body.reasoning_effort,
    )  # fmt: skip


async def way_of(service: Service, request: HttpRequest, body: Sampling, params: SamplingParams) -> Way:
    """How the prompts of a body run.

    Raises:
        ApiError: the body asks for what does not go together.
    """
    way = Way(service, body, params, names_of(request, body))
    try:
        await way.prepare()
    except ValueError as error:
        raise of_value_error(error) from error
    return way


def names_of(request: HttpRequest, body: Sampling) -> list[str]:
    """The names by which a client may abort its request, after the owner of its key."""
    given = {request.scope["request_id"], body.request_id or request.scope["request_id"]}
    return [f"{request.scope['owner']}/{name}" for name in given]


def salt_of(body: Sampling) -> Mapping[str, Any]:
    """The part of a prompt that keeps its cached prefixes apart from others.

    Raises:
        ApiError: the body's salt is none that vLLM's servers take.
    """
    salt = body.cache_salt
    if salt is None:
        return {}
    if not salt or len(salt) > _MOST_SALT or any(letter in salt for letter in "@/\\\0"):
        raise ApiError(
            400, f"cache_salt must have 1 to {_MOST_SALT} characters, none of them @, /, \\ or NUL", "cache_salt"
        )
    return {"cache_salt": salt}
