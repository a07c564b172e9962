"""Around every endpoint: the request's id, its key, errors as bodies, and a line in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any
from urllib.parse import quote

from jaxinfer.server.errors import ApiError, error_body
from jaxinfer.server.events import Reply
from jaxinfer.server.packages import App, HTTPException, Receive, Scope, Send
from jaxinfer.server.settings import ServerSettings

logger = logging.getLogger("jaxinfer.server")

# Answered without a key. Every other path asks for one, whether it exists or not.
OPEN_PATHS = frozenset(["/", "/health", "/ping", "/version", "/metrics", "/metrics/"])
_ID_HEADERS = (b"x-request-id", b"request-id")  # the second one is Anthropic's
_ID = re.compile(r"[!-~]{1,128}")
_METHOD_NOT_ALLOWED = 405


class Gate:
    """The application around the endpoints, as ASGI has it.

    Args:
        app: the endpoints; it raises ApiError, or HTTPException for paths and methods that it does not have.
    """

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        scope["app"] = self  # with it, Starlette raises HTTPException instead of answering by itself
        scope["has_request_id"] = bool(_ID.fullmatch(given))
        scope["request_id"] = given if scope["has_request_id"] else uuid.uuid4().hex
        begin, status = time.perf_counter(), 0

        async def send_named(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = ((header, scope["request_id"].encode()) for header in _ID_HEADERS)
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            owner = self._settings.owner(_key(headers))
            if owner is None and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            scope["owner"] = owner or ""
            await self._app(scope, receive, send_named)
        except Exception as error:
            if status:
                raise  # its response has begun
            refusal, more = _refusal(error, scope)
            if refusal.status == 500:
                logger.exception("request %s to %r has failed", scope["request_id"], scope["path"])
            await _reply_error(refusal, scope, receive, send_named, more)
        finally:
            if self._settings.log_requests:
                seconds = time.perf_counter() - begin
                path = quote(scope["path"])  # a line of the log for each request, whatever it asks for
                logger.info("%s %s %s: %d in %.3f s", scope["request_id"], scope["method"], path, status, seconds)


def take_request_id(scope: Scope, given: str | None) -> None:
    """Let a body name its request, unless its header has."""
    if given is not None and not scope["has_request_id"] and _ID.fullmatch(given):
        scope["request_id"] = given


def _refusal(error: Any, scope: Scope) -> tuple[ApiError, dict[str, str] | None]:
    """What a client is told of an exception, and headers for it."""
    if isinstance(error, ApiError):
        return error, None
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, _detail(error, scope)), error.headers
    return ApiError(500, "an internal error, see the server's log"), None


async def _reply_error(
    error: ApiError, scope: Scope, receive: Receive, send: Send, headers: dict[str, str] | None = None
) -> None:
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.is_final:
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = error_body(error, scope["path"], scope["request_id"])
    await Reply(body, error.status, headers)(scope, receive, send)


def _detail(error: Any, scope: Scope) -> str:
    if error.status_code == _METHOD_NOT_ALLOWED:
        return f"{scope['path'][:200]} does not take {scope['method'][:20]}"
    return f"there is nothing at {scope['path'][:200]}" if error.status_code == 404 else str(error.detail)


def _key(headers: dict[str, str]) -> str | None:
    """The key of a request, as OpenAI's and Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")
