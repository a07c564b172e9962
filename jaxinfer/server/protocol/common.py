"""Fields that several endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxinfer.server.packages import BaseModel, ConfigDict, Field, model_validator

MOST_STOP_STRINGS = 4
# Lists are read up to their first error: there may be as many as entries, and each takes memory.
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class RequestBody(BaseModel):
    """A body of a request. Unknown fields are kept: some are sampling parameters, and others are ignored."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _pause(cls, given: Any) -> Any:
        """Let other threads run: while pydantic's own code reads a list of models, none of them does."""
        return given

    @property
    def extra(self) -> dict[str, Any]:
        """Fields that are not declared."""
        return self.model_extra or {}  # pyright: ignore[reportAttributeAccessIssue]


class ResponseBody(BaseModel):
    """A body of a response."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(None, description="send the usage in a last chunk")
    continuous_usage_stats: bool | None = Field(None, description="send the usage so far in every chunk")


class JsonSchemaFormat(RequestBody):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Sampling(RequestBody):
    """What completions and conversations have in common.

    Every sampling parameter of `jaxinfer.SamplingParams` that is not a field here may be given too.
    """

    model: str | None = Field(None, description="the served model; none or an empty one is taken for it")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(None, ge=0, description="log probabilities of the prompt, whole answers only")
    use_beam_search: bool | None = Field(None, description="n continuations by beam search, whole answers only")
    length_penalty: float | None = Field(None, description="of beam search")
    early_stopping: bool | None = Field(None, description="of beam search")
    branches: Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)] | None = (
        Field(None, min_length=1, description="continue the prompt once for each of these suffixes, which share its KV")
    )
    max_parallel_branches: int | None = Field(None, ge=1, description="most of them that run at once")
    user: str | None = None
    priority: int | None = Field(None, description='lower ones run first, with scheduling_policy="priority"')
    request_id: str | None = None
    cache_salt: str | None = Field(None, description="only requests with the same salt share cached prefixes")
    return_token_ids: bool | None = None
    return_token_sources: bool | None = Field(
        None,
        description='token_sources: for each token "drawn", "draft" (accepted), "redrawn" or "forced"; and token_texts',
    )
    return_blocks: bool | None = Field(None, description="blocks of a diffusion model after each round of denoising")
    return_tokens_as_token_ids: bool | None = None


class PromptTokensDetails(ResponseBody):
    cached_tokens: int


class CompletionTokensDetails(ResponseBody):
    reasoning_tokens: int


class Usage(ResponseBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ErrorDetails(ResponseBody):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseBody):
    error: ErrorDetails
