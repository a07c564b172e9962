"""Bodies of errors: the path alone says in which of two forms they are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxinfer.server.errors import ApiError
from jaxinfer.server.middleware import Gate
from jaxinfer.server.packages import HTTPException
from jaxinfer.server.settings import ServerSettings

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    503: "overloaded_error",
}  # fmt: skip


def answered(error: Exception, path: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the answer to a request that ends with an error."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-request-id", b"abc")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(Gate(app, ServerSettings())(scope, None, send))  # pyright: ignore[reportArgumentType]
    start, content = sent
    return start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, json.loads(content["body"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/nothing"])
@pytest.mark.parametrize("status", TYPES)
def test_anthropics_paths_have_anthropics_form(path, status):
    error: Exception = ApiError(status, "so it is", param="x", code="y")
    if status in (404, 405):
        error = HTTPException(status)
    elif status == 500:
        error = ZeroDivisionError()
    found, headers, body = answered(error, path)
    message = body["error"]["message"]
    assert body == {"type": "error", "error": {"type": TYPES[status], "message": message}, "request_id": "abc"}
    assert found == status and message and headers["request-id"] == headers["x-request-id"] == "abc"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messagesx", "/messages", "//v1/messages"])
def test_other_paths_have_openais_form(path):
    _, _, body = answered(ApiError(413, "so it is", param="x", code="y"), path)
    assert body == {"error": {"message": "so it is", "type": "invalid_request_error", "param": "x", "code": "y"}}


def test_a_full_context_is_told_in_the_words_of_both():
    error = ApiError(400, "This model's maximum context length is 8 tokens", code="context_length_exceeded")
    assert answered(error, "/v1/messages")[2]["error"]["message"].startswith("prompt is too long: This model's maximum")
    assert answered(error, "/v1/completions")[2]["error"]["message"].startswith("This model's maximum")
