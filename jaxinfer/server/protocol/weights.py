"""`/pause`, `/resume` and `/update_weights`."""

from __future__ import annotations

from typing import Any, Literal

from jaxinfer.server.packages import Field
from jaxinfer.server.protocol.common import RequestBody, ResponseBody


class PauseRequest(RequestBody):
    mode: Literal["keep", "wait", "abort"] = Field("keep", description="what becomes of the requests that run")


class ResumeRequest(RequestBody):
    recompute_kv: bool = Field(False, description="compute kept requests anew with the weights of now")


class UpdateWeightsRequest(RequestBody):
    path: str = Field(min_length=1, description="a checkpoint's directory, where the server runs")
    version: str | int | None = Field(None, description="names the weights; null: the number of the update")
    model: Literal["target", "drafter"] = "target"


class WeightsState(ResponseBody):
    is_paused: bool
    weights_version: Any
    why_idle: str | None = Field(description="why nothing is launched; null: launches run")
