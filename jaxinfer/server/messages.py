"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from jaxinfer.server.answering import respond
from jaxinfer.server.bodies import read_model
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
        service.check_ready()
        body = await read_model(request, MessagesRequest, service.settings.max_body_bytes)
        asked = await AskedChat.read(service, chat_request_of(body))
        way = await way_of(service, request, asked.body, asked.params)
        form = MessageForm(
            len(asked.tokens), body.max_tokens, service.llm.config.max_model_len, parser=asked.parser(),
            with_thinking=asked.body.include_reasoning is not False,
        )  # fmt: skip
        answer = MessageAnswer(request.scope["request_id"], service.model_names[0], form)
        return await respond(service, request, asked.running(way), answer, is_stream=bool(body.stream))

    async def count_tokens(self, request: HttpRequest) -> App:
        service = self._service
        service.check_ready()
        body = await read_model(request, CountTokensRequest, service.settings.max_body_bytes)
        service.check_model(body.model)
        chat = chat_request_of(body)
        try:
            tokens = await tokens_of_chat(service, chat, Talk(service, chat))
        except ValueError as error:
            raise of_value_error(error) from error
        return Reply({"input_tokens": len(tokens)})
