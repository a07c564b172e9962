"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.answering import Asked, respond
from jaxinfer.server.bodies import read_model
from jaxinfer.server.chat_answer import ChatAnswer, ChatForm
from jaxinfer.server.completion_answer import CompletionAnswer, CompletionForm
from jaxinfer.server.conversations import tokens_of_messages
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.events import Reply
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.common import Sampling
from jaxinfer.server.protocol.completions import CompletionRequest, prompts_of
from jaxinfer.server.sampling import refuse_uncomputed, sampling_params
from jaxinfer.server.service import Service
from jaxinfer.server.skeleton_answer import SkeletonAnswer, respond_with_skeleton
from jaxinfer.server.talk import Talk
from jaxinfer.server.token_texts import TokenTexts
from jaxinfer.server.ways import Way

_DEFAULT_MAX_TOKENS = 16  # of completions
MOST_PROMPTS = 1024
_MOST_SALT = 128
_NOT_OF_SKELETONS = ("n", "logprobs", "branches", "use_beam_search", "response_format", "prompt_logprobs", "priority")


class Endpoints:
    """Handlers of requests to one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: HttpRequest) -> App:
        return Reply({"object": "list", "data": [self._model(name) for name in self._service.model_names]})

    async def model(self, request: HttpRequest) -> App:
        name = request.path_params["model"]
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
        llm = service.llm
        body = await read_model(request, CompletionRequest, service.settings.max_body_bytes)
        service.check_model(body.model)
        refuse_uncomputed(body)
        if body.best_of is not None and body.best_of > (body.n or 1):
            raise ApiError(400, f"best_of={body.best_of} is not served: it must be at most n", "best_of")
        given = prompts_of(body)
        if not given or len(given) > MOST_PROMPTS:
            raise ApiError(400, f"prompt must be 1 to {MOST_PROMPTS} prompts, got {len(given)}", "prompt")
        most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if most == 0 and not body.echo:
            raise ApiError(400, "max_tokens must be at least 1, or 0 with echo", "max_tokens")
        own = {"max_tokens": max(1, most), "logprobs": body.logprobs}
        if body.echo and body.logprobs is not None:
            own["prompt_logprobs"] = body.logprobs
        try:
            params = sampling_params(body, llm.default_sampling_params, llm.config.max_num_seqs, **own)
            tokens = [
                await service.tokens_of(one, add_special_tokens=body.add_special_tokens is not False)
                if isinstance(one, str)
                else one
                for one in given
            ]
        except ValueError as error:
            raise of_value_error(error) from error
        for prompt in tokens:
            service.check_length(len(prompt) + max(1, most), "max_tokens" if len(prompt) < most else "prompt")
        way = await self._way(request, body, params)
        tokenizer = llm.get_tokenizer()
        form = CompletionForm(
            way.num_choices, body.logprobs, bool(body.echo), body.max_tokens, bool(body.return_token_ids),
            body.prompt_logprobs is not None,
        )  # fmt: skip
        texts = [(one if isinstance(one, str) else tokenizer.decode(one)) if form.echo else "" for one in given]
        envelope = self._envelope("cmpl", request)
        answer = CompletionAnswer(envelope, form, self._texts(body), texts)
        prompts = [
            _prompt(ids, body) | ({"prompt": one} if isinstance(one, str) else {})
            for ids, one in zip(tokens, given, strict=True)
        ]
        return await respond(service, request, body, Asked(prompts, way.num_choices, way.start, answer))

    async def chat(self, request: HttpRequest) -> App:
        service = self._service
        llm = service.llm
        body = await read_model(request, ChatRequest, service.settings.max_body_bytes)
        service.check_model(body.model)
        refuse_uncomputed(body, ("echo", "the last message is not given back"))
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
            tokens = await tokens_of_messages(
                service, body.messages, add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
                documents=body.documents, tools=body.tools if talk.tools.are_callable else None,
            )  # fmt: skip
        except ValueError as error:
            raise of_value_error(error) from error
        service.check_length(len(tokens) + 1, "messages")
        if body.skeleton_of_thought:
            if field := next((name for name in _NOT_OF_SKELETONS if getattr(body, name)), None):
                raise ApiError(400, f"{field} goes without skeleton_of_thought", field)
            envelope = self._envelope("chatcmpl", request)
            skeleton = SkeletonAnswer(envelope, len(tokens), is_merged=body.skeleton_of_thought == "merged")
            return await respond_with_skeleton(service, request, body, params, skeleton)
        way = await self._way(request, body, params)
        form = ChatForm(
            way.num_choices, own["logprobs"], bool(body.return_token_ids), parser=talk.parser(tokens),
            with_reasoning=body.include_reasoning is not False, is_named=talk.tools.name is not None,
        )  # fmt: skip
        answer = ChatAnswer(self._envelope("chatcmpl", request), form, self._texts(body))
        prompts = [_prompt(tokens, body)]
        return await respond(service, request, body, Asked(prompts, way.num_choices, way.start, answer))

    async def _way(self, request: HttpRequest, body: Sampling, params: SamplingParams) -> Way:
        way = Way(self._service, body, params, _name(request, body))
        try:
            await way.prepare()
        except ValueError as error:
            raise of_value_error(error) from error
        return way

    def _texts(self, body: Sampling) -> TokenTexts:
        return TokenTexts(self._service.llm.get_tokenizer(), as_ids=bool(body.return_tokens_as_token_ids))

    def _envelope(self, prefix: str, request: HttpRequest) -> Envelope:
        service = self._service
        return Envelope(f"{prefix}-{request.scope['request_id']}", service.model_names[0], service.fingerprint)


def _prompt(token_ids: list[int], body: Sampling) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt_token_ids": token_ids}
    salt = body.cache_salt
    if salt is not None:
        if not salt or len(salt) > _MOST_SALT or any(letter in salt for letter in "@/\\\0"):
            raise ApiError(
                400, f"cache_salt must have 1 to {_MOST_SALT} characters, none of them @, /, \\ or NUL", "cache_salt"
            )
        found["cache_salt"] = salt
    return found


def _name(request: HttpRequest, body: Sampling) -> str:
    """The request's name in the engine: that of its client, after the owner of its key."""
    return f"{request.scope['owner']}/{body.request_id or request.scope['request_id']}"
