"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxinfer.server.packages import Field
from jaxinfer.server.protocol.common import ResponseBody, Sampling, TokenIds, Usage


class CompletionRequest(Sampling):
    prompt: (
        str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    ) = Field(description="one prompt, or several")
    max_tokens: int | None = Field(None, ge=0, description="16 by default; 0 with echo alone")
    echo: bool | None = Field(None, description="give the prompt back too")
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(ResponseBody):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(ResponseBody):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None


class CompletionResponse(ResponseBody):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


type Prompt = str | list[int]


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a request, texts or lists of token ids."""
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)
