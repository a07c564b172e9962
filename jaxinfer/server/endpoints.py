"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.answering import respond
from jaxinfer.server.bodies import read_body
from jaxinfer.server.chat_answer import ChatAnswer, ChatForm
from jaxinfer.server.chat_request import AskedChat, names_of, way_of
from jaxinfer.server.completion_answer import CompletionAnswer, CompletionForm
from jaxinfer.server.completion_request import AskedCompletions
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.errors import ApiError
from jaxinfer.server.events import Reply
from jaxinfer.server.middleware import take_request_id
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.common import Sampling
from jaxinfer.server.protocol.completions import CompletionRequest
from jaxinfer.server.sampling import structured_outputs_of
from jaxinfer.server.service import Service
from jaxinfer.server.skeleton_answer import SkeletonAnswer, running_skeleton
from jaxinfer.server.token_details import TokenDetails
from jaxinfer.server.token_texts import TokenTexts

_NOT_OF_SKELETONS = (
    "n", "logprobs", "branches", "use_beam_search", "response_format", "prompt_logprobs", "priority", "cache_salt",
    "return_token_sources", "return_blocks", "return_token_ids", "tools", "documents", "chat_template_kwargs",
    "continue_final_message", "reasoning_effort", "structured_outputs",
)  # fmt: skip


class Endpoints:
    """Handlers of requests to one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: HttpRequest) -> App:
        return Reply({"object": "list", "data": [self._model(name) for name in self._service.model_names]})

    async def model(self, request: HttpRequest) -> App:
        name = request.path_params["model"]
        if not name:
            raise ApiError(404, "the path has no name of a model: /v1/models has them", code="model_not_found")
        self._service.check_model(name)
        return Reply(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        service = self._service
        most = None if service.loaded is None else service.loaded.config.max_model_len
        return {
            "id": name, "object": "model", "created": service.created, "owned_by": "jaxinfer",
            "root": service.model_names[0], "parent": None, "max_model_len": most,
        }  # fmt: skip

    async def completions(self, request: HttpRequest) -> App:
        service = self._service
        body = await read_body(service, request, CompletionRequest)
        take_request_id(request.scope, body.request_id)
        asked = await AskedCompletions.read(service, body)
        way = await way_of(service, request, body, asked.params)
        form = CompletionForm(
            way.num_choices, body.logprobs, bool(body.echo), body.max_tokens, bool(body.return_token_ids),
            body.prompt_logprobs is not None, self._details(body, asked.params),
        )  # fmt: skip
        envelope = self._envelope("cmpl", request)
        answer = CompletionAnswer(envelope, body.stream_options, form, self._texts(body), asked.texts)
        if way.num_suffix_tokens:
            envelope.count_tokens(way.num_suffix_tokens * len(asked.prompts), 0)
        running = service.running(asked.prompts, way.num_choices, way.start, way.names)
        return await respond(service, request, running, answer, is_stream=bool(body.stream))

    async def chat(self, request: HttpRequest) -> App:
        service = self._service
        body = await read_body(service, request, ChatRequest)
        take_request_id(request.scope, body.request_id)
        asked = await AskedChat.read(service, body)
        envelope, is_stream = self._envelope("chatcmpl", request), bool(body.stream)
        if body.skeleton_of_thought:
            given = {name: getattr(body, name, None) for name in _NOT_OF_SKELETONS} | _neutral_of(body)
            if field := next((name for name, value in given.items() if value), None):
                raise ApiError(400, f"{field} goes without skeleton_of_thought", field)
            num_tokens = len(asked.tokens)
            is_merged = body.skeleton_of_thought == "merged"
            skeleton = SkeletonAnswer(envelope, body.stream_options, num_tokens, is_merged=is_merged)
            running = running_skeleton(service, body, asked.params, num_tokens, names_of(request, body))
            return await respond(service, request, running, skeleton, is_stream=is_stream)
        way = await way_of(service, request, body, asked.params)
        form = ChatForm(
            way.num_choices, asked.params.logprobs, bool(body.return_token_ids), parser=asked.parser(),
            with_reasoning=body.include_reasoning is not False, is_named=asked.talk.tools.name is not None,
            details=self._details(body, asked.params),
        )  # fmt: skip
        if way.num_suffix_tokens:
            envelope.count_tokens(way.num_suffix_tokens, 0)
        answer = ChatAnswer(envelope, body.stream_options, form, self._texts(body))
        return await respond(service, request, asked.running(way), answer, is_stream=is_stream)

    def _texts(self, body: Sampling) -> TokenTexts:
        return TokenTexts(self._service.llm.get_tokenizer(), as_ids=bool(body.return_tokens_as_token_ids))

    def _details(self, body: Sampling, params: SamplingParams) -> Callable[[], TokenDetails] | None:
        """What makes the writer of what a choice says of its tokens; None: nothing is asked for."""
        if not (body.return_token_sources or body.return_blocks):
            return None
        tokenizer = self._service.llm.get_tokenizer()
        return partial(TokenDetails, tokenizer, params.skip_special_tokens, bool(body.return_token_sources))

    def _envelope(self, prefix: str, request: HttpRequest) -> Envelope:
        service = self._service
        return Envelope(f"{prefix}-{request.scope['request_id']}", service.model_names[0], service.fingerprint)


def _neutral_of(body: ChatRequest) -> dict[str, Any]:
    """Fields of a body that ask for nothing, as if they were not there."""
    found: dict[str, Any] = {} if body.n not in (None, 1) else {"n": None}
    return found if structured_outputs_of(body.response_format) is not None else found | {"response_format": None}
