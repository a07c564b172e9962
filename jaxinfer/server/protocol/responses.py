"""`/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxinfer.server.packages import Field
from jaxinfer.server.protocol.common import RequestBody, ResponseBody

MOST_METADATA, MOST_OF_METADATA = 16, 512  # entries, and characters of one
LOGPROBS = "message.output_text.logprobs"  # of `include`


class InputPart(RequestBody):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(RequestBody):
    """A message, a call, its output, or reasoning: which fields it needs depends on its type."""

    type: str | None = Field(None, description="message (the default), function_call, function_call_output, reasoning")
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = None


class FunctionOfResponses(RequestBody):
    type: str = Field(description="function: built-in tools are not served")
    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(RequestBody):
    type: str
    name: str | None = None


class TextFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestBody):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(RequestBody):
    effort: str | None = Field(None, description='"none" switches reasoning off where the chat template has a switch')
    summary: str | None = None


class ResponsesRequest(RequestBody):
    """A conversation to answer.

    Further fields are those of `/v1/chat/completions`, sampling parameters among them.
    """

    model: str | None = Field(None, description="the served model; none or an empty one is taken for it")
    input: str | Annotated[list[InputItem], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="true by default: keep the response in memory")
    background: bool | None = Field(None, description="answer at once, and run until it has ended or is cancelled")
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = Field(None, ge=0)
    text: TextOptions | None = None
    tools: Annotated[list[FunctionOfResponses], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None
    metadata: dict[str, Annotated[str, Field(max_length=MOST_OF_METADATA)]] | None = Field(
        None, max_length=MOST_METADATA
    )
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out of the answer")
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """Fields that are not declared."""
        return self.model_extra or {}  # pyright: ignore[reportAttributeAccessIssue]


class InputTokensDetails(ResponseBody):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseBody):
    reasoning_tokens: int


class UsageOfResponse(ResponseBody):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputItem(ResponseBody):
    """A message, a call or reasoning."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class ErrorOfResponse(ResponseBody):
    code: str
    message: str


class IncompleteDetails(ResponseBody):
    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseBody):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ErrorOfResponse | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: UsageOfResponse | None
    background: bool
    store: bool
    previous_response_id: str | None
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    temperature: float | None
    top_p: float | None
    metadata: dict[str, str]


class DeletedResponse(ResponseBody):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(ResponseBody):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
