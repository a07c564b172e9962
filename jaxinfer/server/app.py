"""The application: paths, and the OpenAPI document that says what they answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from jaxinfer.server.endpoints import Endpoints
from jaxinfer.server.errors import is_anthropic
from jaxinfer.server.events import Reply
from jaxinfer.server.messages import Messages
from jaxinfer.server.middleware import OPEN_PATHS, Gate
from jaxinfer.server.operations import Operations
from jaxinfer.server.packages import (
    App,
    CORSMiddleware,
    HttpRequest,
    Receive,
    Route,
    Router,
    Scope,
    Send,
    StarletteRequest,
    models_json_schema,
)
from jaxinfer.server.page import Page
from jaxinfer.server.protocol.chat import ChatRequest, ChatResponse
from jaxinfer.server.protocol.common import ErrorBody
from jaxinfer.server.protocol.completions import CompletionRequest, CompletionResponse
from jaxinfer.server.protocol.messages import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesErrorBody,
    MessagesRequest,
    MessagesResponse,
)
from jaxinfer.server.protocol.render import RenderedRequest, RenderedRequests
from jaxinfer.server.protocol.responses import DeletedResponse, InputItemList, ResponseObject, ResponsesRequest
from jaxinfer.server.protocol.tokens import (
    AbortRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxinfer.server.protocol.weights import PauseRequest, ResumeRequest, UpdateWeightsRequest, WeightsState
from jaxinfer.server.render import Render
from jaxinfer.server.responses import QUERY_OF_ITEMS, QUERY_OF_RESPONSE, ResponsesEndpoints
from jaxinfer.server.service import Service
from jaxinfer.server.weights import Weights

type Handler = Callable[[HttpRequest], Awaitable[App]]

_ERRORS = {400: "the request is wrong", 413: "the body is too large", 503: "loading, full, shutting down or dead"}
_OF_PATH = re.compile(r"\{(\w+)")


@dataclass(frozen=True)
class Endpoint:
    """A path, and what it takes and gives.

    Attributes:
        body, answer: models of JSON; None: there is no body, or the answer is an object of no declared form.
        statuses: of errors, besides 401 and 405.
        query: schemas of the parameters of its query by their names; all may be left out, and others are ignored.
        kind: content type of the answer; empty: it has no content.
        streams: whether the answer may be a stream of events.
    """

    path: str
    method: str
    handler: Handler
    summary: str
    body: type | None = None
    answer: type | None = None
    statuses: tuple[int, ...] = ()
    query: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "application/json"
    streams: bool = False


def endpoints_of(service: Service) -> list[Endpoint]:
    """Everything that is served."""
    api, messages, render, operations = Endpoints(service), Messages(service), Render(service), Operations(service)
    responses = ResponsesEndpoints(service)
    posted = (400, 404, 413, 503)
    page = (
        [Endpoint("/", "GET", Page().serve, "the page for people", kind="text/html")] if service.settings.page else []
    )
    found = [
        *page,
        Endpoint("/v1/models", "GET", api.models, "the served models"),
        Endpoint("/v1/models/{model:path}", "GET", api.model, "one served model", statuses=(404,)),
        Endpoint(
            "/v1/completions", "POST", api.completions, "continue prompts", CompletionRequest, CompletionResponse,
            posted, streams=True,
        ),
        Endpoint(
            "/v1/chat/completions", "POST", api.chat, "answer a conversation", ChatRequest, ChatResponse, posted,
            streams=True,
        ),
        Endpoint(
            "/v1/messages", "POST", messages.create, "answer a conversation of Anthropic's API", MessagesRequest,
            MessagesResponse, posted, streams=True,
        ),
        Endpoint(
            "/v1/messages/count_tokens", "POST", messages.count_tokens, "count the tokens of a conversation",
            CountTokensRequest, CountTokensResponse, posted,
        ),
        Endpoint(
            "/v1/completions/render", "POST", render.completions, "prompts in tokens", CompletionRequest,
            RenderedRequests, posted,
        ),
        Endpoint(
            "/v1/chat/completions/render", "POST", render.chat, "a conversation in tokens", ChatRequest,
            RenderedRequest, posted,
        ),
        Endpoint(
            "/v1/messages/render", "POST", render.messages, "a conversation of Anthropic's API in tokens",
            MessagesRequest, RenderedRequest, posted,
        ),
        Endpoint(
            "/v1/responses/render", "POST", responses.render, "a conversation of responses in tokens",
            ResponsesRequest, RenderedRequest, posted,
        ),
        Endpoint(
            "/v1/responses", "POST", responses.create, "answer a conversation that the server may remember",
            ResponsesRequest, ResponseObject, posted, streams=True,
        ),
        Endpoint(
            "/v1/responses/{response_id}", "GET", responses.response, "a response that is kept or runs", None,
            ResponseObject, (400, 404), QUERY_OF_RESPONSE,
        ),
        Endpoint(
            "/v1/responses/{response_id}", "DELETE", responses.delete, "forget a response; if it runs, it ends", None,
            DeletedResponse, (400, 404),
        ),
        Endpoint(
            "/v1/responses/{response_id}/cancel", "POST", responses.cancel, "end a response in the background", None,
            ResponseObject, (400, 404),
        ),
        Endpoint(
            "/v1/responses/{response_id}/input_items", "GET", responses.input_items, "the items that were answered",
            None, InputItemList, (400, 404), QUERY_OF_ITEMS,
        ),
        Endpoint(
            "/tokenize", "POST", operations.tokenize, "tokens of a text or conversation", TokenizeRequest,
            TokenizeResponse, posted,
        ),
        Endpoint(
            "/detokenize", "POST", operations.detokenize, "the text of tokens", DetokenizeRequest, DetokenizeResponse,
            posted,
        ),
        Endpoint(
            "/abort_requests", "POST", operations.abort, "end requests of the same key", AbortRequest,
            statuses=(400, 413, 503),
        ),
        Endpoint(
            "/reset_prefix_cache", "POST", operations.reset_prefix_cache, "forget cached prefixes", statuses=(503,)
        ),
        Endpoint("/health", "GET", operations.health, "200 once requests are taken", statuses=(503,), kind=""),
        Endpoint("/ping", "GET", operations.health, "the same as /health", statuses=(503,), kind=""),
        Endpoint("/version", "GET", operations.version, "the version"),
        Endpoint("/load", "GET", operations.load, "requests that have not ended"),
        Endpoint("/metrics", "GET", operations.metrics, "metrics for Prometheus", kind="text/plain"),
        Endpoint("/metrics/", "GET", operations.metrics, "metrics for Prometheus", kind="text/plain"),
    ]  # fmt: skip
    if service.settings.weights_endpoints:
        weights, refused = Weights(service), (400, 413, 503)
        found += [
            Endpoint("/pause", "POST", weights.pause, "launch nothing", PauseRequest, WeightsState, refused),
            Endpoint("/resume", "POST", weights.resume, "continue after a pause", ResumeRequest, WeightsState, refused),
            Endpoint("/is_paused", "GET", weights.state, "pauses and weights", None, WeightsState, (503,)),
            Endpoint(
                "/update_weights", "POST", weights.update, "weights from a directory", UpdateWeightsRequest,
                WeightsState, refused,
            ),
        ]  # fmt: skip
    if service.settings.debug_endpoints:
        found.append(Endpoint("/debug/engine", "GET", operations.engine, "what the engine holds", statuses=(503,)))
    return found


def build_app(service: Service) -> App:
    """Return the ASGI application of a service."""
    endpoints = endpoints_of(service)
    document = openapi(endpoints)

    async def described(request: HttpRequest) -> App:
        return Reply(document)

    routes = [Route(each.path, _Handled(each.handler), methods=[each.method]) for each in endpoints]
    routes.append(Route("/openapi.json", _Handled(described), methods=["GET"]))
    app: App = Gate(Router(routes=routes, redirect_slashes=False), service.settings)
    if service.settings.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=list(service.settings.cors_origins), allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"], expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )  # fmt: skip
    return app


class _Handled:
    """A handler as an ASGI application: Starlette takes functions for handlers that return its own responses."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(StarletteRequest(scope, receive))
        await response(scope, receive, send)


def openapi(endpoints: list[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI document of endpoints."""
    models = {model for each in endpoints for model in (each.body, each.answer) if model is not None}
    models |= {ErrorBody, MessagesErrorBody}
    places, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    found: dict[str, Any] = {}
    for each in endpoints:
        found.setdefault(each.path.replace(":path", ""), {})[each.method.lower()] = _operation(each, places)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": version("jaxinfer")},
        "paths": found,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(each: Endpoint, places: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": "object"} if each.answer is None else places[each.answer, "validation"]
    content: dict[str, Any] = {}
    if each.kind:
        content[each.kind] = {"schema": answer if each.kind == "application/json" else {"type": "string"}}
    if each.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error_model = MessagesErrorBody if is_anthropic(each.path) else ErrorBody
    error = {"application/json": {"schema": places[error_model, "validation"]}}
    responses: dict[str, Any] = {"200": {"description": each.summary, **({"content": content} if content else {})}}
    for status in each.statuses:
        responses[str(status)] = {"description": _ERRORS.get(status, "not found"), "content": error}
    operation: dict[str, Any] = {"summary": each.summary, "responses": responses}
    if each.path not in OPEN_PATHS:
        responses["401"] = {"description": "the key is missing or wrong", "content": error}
        operation["security"] = [{"key": []}]
    if each.body is not None:
        schema = places[each.body, "validation"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    found = [("path", name, {"type": "string"}) for name in _OF_PATH.findall(each.path)]
    found += [("query", name, schema) for name, schema in each.query.items()]
    if found:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": schema} for place, name, schema in found
        ]
    return operation
