"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from jaxinfer.server.packages import Field
from jaxinfer.server.protocol.chat import Message
from jaxinfer.server.protocol.common import RequestBody, ResponseBody


class TokenizeRequest(RequestBody):
    """A text, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="true by default for a text, false for a conversation")
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
    tokens: list[int] = Field(max_length=1 << 20)


class DetokenizeResponse(ResponseBody):
    prompt: str


class AbortRequest(RequestBody):
    request_ids: list[str] = Field(max_length=1024, description="as X-Request-Id or request_id had them")
