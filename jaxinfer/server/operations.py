"""Endpoints beside those that answer: health, metrics, tokens of texts, aborts and the prefix cache."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from importlib.metadata import version

from jaxinfer.server.bodies import read_body
from jaxinfer.server.conversations import REFUSED_OF_CONVERSATIONS, tokens_of_messages
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.events import Reply
from jaxinfer.server.json_text import pieces_of
from jaxinfer.server.metrics import exposition
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.tokens import AbortRequest, DetokenizeRequest, TokenizeRequest
from jaxinfer.server.sampling import refuse_uncomputed
from jaxinfer.server.service import Service

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_OF_ANSWERS = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # words before the ids of requests


class Operations:
    """Handlers of what operators and routers ask."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: HttpRequest) -> App:
        self._service.check_ready()
        return Reply(b"")

    async def version(self, request: HttpRequest) -> App:
        return Reply({"version": version("jaxinfer")})

    async def load(self, request: HttpRequest) -> App:
        return Reply({"server_load": self._service.num_running})

    async def metrics(self, request: HttpRequest) -> App:
        return Reply(exposition(self._service).encode(), headers={"content-type": PROMETHEUS})

    async def tokenize(self, request: HttpRequest) -> App:
        service = self._service
        body = await read_body(service, request, TokenizeRequest)
        service.check_model(body.model)
        refuse_uncomputed(body, *(REFUSED_OF_CONVERSATIONS if body.messages is not None else ()))
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "one of prompt and messages is needed", "prompt")
        try:
            return Reply(await asyncio.to_thread(_tokens_of, service, body))
        except ValueError as error:
            raise of_value_error(error) from error

    async def detokenize(self, request: HttpRequest) -> App:
        service = self._service
        tokenizer = service.llm.get_tokenizer()
        body = await read_body(service, request, DetokenizeRequest)
        service.check_model(body.model)
        most = tokenizer.fast.get_vocab_size()
        wrong = next((token for token in body.tokens if not 0 <= token < most), None)
        if wrong is not None:
            raise ApiError(400, f"tokens has {wrong}, outside the vocabulary of {most}", "tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return Reply({"prompt": text})

    async def abort(self, request: HttpRequest) -> App:
        service = self._service
        body = await read_body(service, request, AbortRequest)
        for name in body.request_ids:
            # The id of an answer is that of its request after a word.
            for known in {name, *(name.removeprefix(word) for word in _OF_ANSWERS)}:
                service.abort(f"{request.scope['owner']}/{known}")
        return Reply({})

    async def engine(self, request: HttpRequest) -> App:
        found = asdict(await self._service.llm.inspect())
        return Reply(found | {"num_http_requests": self._service.num_running, "num_tasks": len(asyncio.all_tasks())})

    async def reset_prefix_cache(self, request: HttpRequest) -> App:
        return Reply({"success": await self._service.llm.reset_prefix_cache()})


def _tokens_of(service: Service, body: TokenizeRequest) -> bytes:
    """The answer of `/tokenize`, as JSON."""
    llm = service.llm
    if body.messages is None:
        tokens = llm.get_tokenizer().encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    else:
        tokens = tokens_of_messages(
            service, body.messages, add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
            documents=body.documents, tools=body.tools,
        )  # fmt: skip
    found = {"count": len(tokens), "max_model_len": llm.config.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        decode = llm.get_tokenizer().decode
        found["token_strs"] = [decode([token], skip_special_tokens=False) for token in tokens]
    return b"".join(piece.encode() for piece in pieces_of(found))
