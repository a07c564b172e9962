"""`/v1/.../render`, as vLLM answers it: requests in tokens, before anything runs."""

from __future__ import annotations

from typing import Any

from jaxinfer.server.packages import RootModel
from jaxinfer.server.protocol.common import ResponseBody


class RenderedRequest(ResponseBody):
    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int


class RenderedRequests(RootModel[list[RenderedRequest]]):
    """One for each prompt."""
