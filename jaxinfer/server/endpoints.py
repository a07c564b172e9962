"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from jaxinfer.server.answering import respond
from jaxinfer.server.bodies import read_model
from jaxinfer.server.chat_answer import ChatAnswer, ChatForm
from jaxinfer.server.chat_request import AskedChat, salt_of, way_of
from jaxinfer.server.completion_answer import CompletionAnswer, CompletionForm
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.events import Reply
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.common import Sampling
from jaxinfer.server.protocol.completions import CompletionRequest, prompts_of
from jaxinfer.server.sampling import refuse_uncomputed, sampling_params
from jaxinfer.server.service import Service
from jaxinfer.server.skeleton_answer import SkeletonAnswer, running_skeleton
from jaxinfer.server.token_texts import TokenTexts

_DEFAULT_MAX_TOKENS = 16  # of completions
MOST_PROMPTS = 1024
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
        way = await way_of(service, request, body, params)
        tokenizer = llm.get_tokenizer()
        form = CompletionForm(
            way.num_choices, body.logprobs, bool(body.echo), body.max_tokens, bool(body.return_token_ids),
            body.prompt_logprobs is not None,
        )  # fmt: skip
        texts = [(one if isinstance(one, str) else tokenizer.decode(one)) if form.echo else "" for one in given]
        envelope = self._envelope("cmpl", request)
        answer = CompletionAnswer(envelope, body.stream_options, form, self._texts(body), texts)
        salt = salt_of(body)
        prompts = [
            {"prompt_token_ids": ids, **salt, **({"prompt": one} if isinstance(one, str) else {})}
            for ids, one in zip(tokens, given, strict=True)
        ]
        running = service.running(prompts, way.num_choices, way.start)
        return await respond(service, request, running, answer, is_stream=bool(body.stream))

    async def chat(self, request: HttpRequest) -> App:
        service = self._service
        service.check_ready()
        body = await read_model(request, ChatRequest, service.settings.max_body_bytes)
        asked = await AskedChat.read(service, body)
        envelope, is_stream = self._envelope("chatcmpl", request), bool(body.stream)
        if body.skeleton_of_thought:
            if field := next((name for name in _NOT_OF_SKELETONS if getattr(body, name)), None):
                raise ApiError(400, f"{field} goes without skeleton_of_thought", field)
            num_tokens = len(asked.tokens)
            is_merged = body.skeleton_of_thought == "merged"
            skeleton = SkeletonAnswer(envelope, body.stream_options, num_tokens, is_merged=is_merged)
            running = running_skeleton(service, body, asked.params, num_tokens)
            return await respond(service, request, running, skeleton, is_stream=is_stream)
        way = await way_of(service, request, body, asked.params)
        form = ChatForm(
            way.num_choices, asked.params.logprobs, bool(body.return_token_ids), parser=asked.parser(),
            with_reasoning=body.include_reasoning is not False, is_named=asked.talk.tools.name is not None,
        )  # fmt: skip
        answer = ChatAnswer(envelope, body.stream_options, form, self._texts(body))
        return await respond(service, request, asked.running(way), answer, is_stream=is_stream)

    def _texts(self, body: Sampling) -> TokenTexts:
        return TokenTexts(self._service.llm.get_tokenizer(), as_ids=bool(body.return_tokens_as_token_ids))

    def _envelope(self, prefix: str, request: HttpRequest) -> Envelope:
        service = self._service
        return Envelope(f"{prefix}-{request.scope['request_id']}", service.model_names[0], service.fingerprint)
