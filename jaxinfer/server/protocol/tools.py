"""Tools of a conversation, and calls of them."""

from __future__ import annotations

from typing import Any, Literal

from jaxinfer.server.packages import Field
from jaxinfer.server.protocol.common import RequestBody, ResponseBody


class FunctionOfTool(RequestBody):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"]
    function: FunctionOfTool


class NameOfFunction(RequestBody):
    name: str


class NamedChoice(RequestBody):
    type: Literal["function"]
    function: NameOfFunction


class CalledFunction(ResponseBody):
    name: str
    arguments: str


class ToolCall(ResponseBody):
    id: str
    type: Literal["function"]
    function: CalledFunction
