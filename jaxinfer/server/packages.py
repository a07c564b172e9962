"""The server's optional packages, each imported here alone."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type App = Callable[[Scope, Receive, Send], Awaitable[None]]

_MISSING = "jaxinfer serve and jaxinfer batch need the extra `server` (pip install 'jaxinfer[server]'): {}"


class HttpRequest(Protocol):
    """A request of Starlette, as far as the server reads it."""

    headers: Mapping[str, str]
    path_params: Mapping[str, Any]
    query_params: Mapping[str, str]
    scope: Scope
    receive: Receive

    def stream(self) -> AsyncIterator[bytes]: ...


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(_MISSING.format(error)) from error


BaseModel: Any = _module("pydantic").BaseModel
ConfigDict: Any = _module("pydantic").ConfigDict
Discriminator: Any = _module("pydantic").Discriminator
Field: Any = _module("pydantic").Field
RootModel: Any = _module("pydantic").RootModel
Tag: Any = _module("pydantic").Tag
ValidationError: Any = _module("pydantic").ValidationError
from_json: Any = _module("pydantic_core").from_json
model_validator: Any = _module("pydantic").model_validator
models_json_schema: Any = _module("pydantic.json_schema").models_json_schema
Route: Any = _module("starlette.routing").Route
Router: Any = _module("starlette.routing").Router
StarletteRequest: Any = _module("starlette.requests").Request
HTTPException: Any = _module("starlette.exceptions").HTTPException
ClientDisconnect: Any = _module("starlette.requests").ClientDisconnect
CORSMiddleware: Any = _module("starlette.middleware.cors").CORSMiddleware
uvicorn: Any = _module("uvicorn")
H11Protocol: Any = _module("uvicorn.protocols.http.h11_impl").H11Protocol
h11: Any = _module("h11")
