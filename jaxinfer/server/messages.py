"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio

from jaxinfer.server.answering import respond
from jaxinfer.server.bodies import read_body_as
from jaxinfer.server.chat_request import AskedChat, tokens_of_chat, way_of
from jaxinfer.server.errors import of_value_error
from jaxinfer.server.events import Reply
from jaxinfer.server.messages_answer import MessageAnswer, MessageForm
from jaxinfer.server.messages_request import chat_request_of
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.messages import CountTokensRequest, MessagesRequest
from jaxinfer.server.service import Service
from jaxinfer.server.talk import Talk


class Messages:
    """Handlers of Anthropic's API."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: HttpRequest) -> App:
        service = self._service
        chat = await read_body_as(service, request, MessagesRequest, chat_request_of)
        asked = await AskedChat.read(service, chat)
        way = await way_of(service, request, asked.body, asked.params)
        form = MessageForm(
            len(asked.tokens), chat.max_tokens or 0, service.llm.config.max_model_len, parser=asked.parser(),
            with_thinking=asked.body.include_reasoning is not False,
        )  # fmt: skip
        answer = MessageAnswer(request.scope["request_id"], service.model_names[0], form)
        return await respond(service, request, asked.running(way), answer, is_stream=bool(chat.stream))

    async def count_tokens(self, request: HttpRequest) -> App:
        service = self._service
        chat = await read_body_as(service, request, CountTokensRequest, chat_request_of)
        service.check_model(chat.model)
        try:
            tokens = await asyncio.to_thread(lambda: tokens_of_chat(service, chat, Talk(service, chat)))
        except ValueError as error:
            raise of_value_error(error) from error
        return Reply({"input_tokens": len(tokens)})
