"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from jaxinfer.server.packages import Field
from jaxinfer.server.protocol.chat import Message
from jaxinfer.server.protocol.common import RequestBody, ResponseBody, TokenIds
from jaxinfer.server.protocol.tools import Tool


class TokenizeRequest(RequestBody):
    """A text, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(None, min_length=1)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(None, description="true by default, for a text alone")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(ResponseBody):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: TokenIds = Field(max_length=1 << 20)


class DetokenizeResponse(ResponseBody):
    prompt: str


class AbortRequest(RequestBody):
    request_ids: Annotated[list[str], Field(fail_fast=True)] = Field(
        max_length=1024, description="as X-Request-Id or request_id had them"
    )
