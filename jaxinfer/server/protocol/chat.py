"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxinfer.server.packages import Field
from jaxinfer.server.protocol.common import RequestBody, ResponseBody, Sampling, Usage
from jaxinfer.server.protocol.tools import NamedChoice, Tool, ToolCall

ROLES = ("developer", "system", "user", "assistant", "tool", "function")


class TextPart(RequestBody):
    type: str
    text: str | None = None


class Message(RequestBody):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart | str], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="goes before max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out of the answer")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_effort: str | None = Field(
        None, description='"none" switches reasoning off where the chat template has a switch'
    )
    echo: bool | None = None
    skeleton_of_thought: bool | Literal["points", "merged"] | None = Field(
        None, description="answer by a skeleton and its points, as choices (true) or merged into one"
    )


class TopLogprob(ResponseBody):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseBody):
    content: list[TokenLogprob] | None
    refusal: None = None


class AssistantMessage(ResponseBody):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ResponseBody):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]
    stop_reason: int | str | None = None


class ChatResponse(ResponseBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
