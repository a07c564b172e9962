"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxinfer.server.packages import Discriminator, Field, Tag
from jaxinfer.server.protocol.common import MOST_STOP_STRINGS, RequestBody, ResponseBody

# Kinds of blocks. Their tags begin with capital letters, by which places of errors leave them out.
_TAGS = {
    "text": "Text", "thinking": "Thinking", "redacted_thinking": "Redacted", "tool_use": "Use",
    "tool_result": "Result",
}  # fmt: skip
_CUSTOM = "custom"


class TextBlock(RequestBody):
    type: Literal["text"]
    text: str


class ThinkingBlock(RequestBody):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="empty in answers, and not looked at in requests")


class RedactedThinkingBlock(RequestBody):
    type: Literal["redacted_thinking"]


class ToolUseBlock(RequestBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(RequestBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


class OtherBlock(RequestBody):
    """A block of a kind that is refused by its name."""

    type: str = Field(json_schema_extra={"not": {"enum": list(_TAGS)}})


def _tag_of_block(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _TAGS.get(kind, "Other") if isinstance(kind, str) else "Other"


def _tag_of_content(value: Any) -> str:
    return "Blocks" if isinstance(value, list) else "Text"


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedThinkingBlock, Tag("Redacted")]
    | Annotated[ToolUseBlock, Tag("Use")]
    | Annotated[ToolResultBlock, Tag("Result")]
    | Annotated[OtherBlock, Tag("Other")],
    Discriminator(_tag_of_block),
]
Content = Annotated[
    Annotated[str, Tag("Text")] | Annotated[list[Block], Field(fail_fast=True), Tag("Blocks")],
    Discriminator(_tag_of_content),
]


class Turn(RequestBody):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ClientTool(RequestBody):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class OtherTool(RequestBody):
    """A tool that Anthropic runs or describes, which is refused by its name."""

    type: str = Field(json_schema_extra={"not": {"const": _CUSTOM}})


def _tag_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "Other" if isinstance(kind, str) and kind != _CUSTOM else "Custom"


AnyTool = Annotated[
    Annotated[ClientTool, Tag("Custom")] | Annotated[OtherTool, Tag("Other")], Discriminator(_tag_of_tool)
]


class ChoiceOfTool(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description='of the tool that has to be called, with "tool"')
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, description="not kept to: the model thinks as long as it does")
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted: thinking is not shown")


class SchemaOfAnswer(RequestBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    format: SchemaOfAnswer | None = None
    effort: str | None = Field(None, description="has no effect")


class MessagesPrompt(RequestBody):
    """What a conversation has before its answer."""

    model: str | None = Field(None, description="the served model; none or an empty one is taken for it")
    messages: Annotated[list[Turn], Field(fail_fast=True)] = Field(min_length=1)
    system: Content | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = None
    tool_choice: ChoiceOfTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class CountTokensRequest(MessagesPrompt):
    """Body of `/v1/messages/count_tokens`."""


class MessagesRequest(MessagesPrompt):
    """Body of `/v1/messages`.

    Sampling parameters of `jaxinfer.SamplingParams` may be given too: `seed`, `min_p` and others.
    """

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=MOST_STOP_STRINGS)
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class MessagesUsage(ResponseBody):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(ResponseBody):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessagesUsage


class CountTokensResponse(ResponseBody):
    input_tokens: int


class MessagesErrorDetails(ResponseBody):
    type: str
    message: str


class MessagesErrorBody(ResponseBody):
    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str
