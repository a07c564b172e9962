"""Errors of requests, and their bodies as OpenAI's and Anthropic's clients read them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from jaxinfer.sampling_params import SamplingParams

# What a message quotes of an input is cut, and so are many errors in one body.
MOST_CHARACTERS = 600
_MOST_ERRORS = 10
# Unions name their members in the places of errors.
_INTERNAL = re.compile(
    r"^(function-|is-instance|json-or-python|lax-or-strict|list\[|dict\[|tagged-union|literal\[|[A-Z]|str$|bool$)"
)
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "invalid_request_error",
    413: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_TYPE_OF_413 = "request_too_large"  # of Anthropic's, which are equal otherwise
_CONTEXT = "context_length_exceeded"
ABORTED = "aborted"
_MESSAGES = "/v1/messages"
_PARAMETERS = frozenset(field.name for field in fields(SamplingParams))


@dataclass
class ApiError(Exception):
    """An error that ends a request.

    Attributes:
        status: of HTTP.
        message: for people.
        param: the field of the body that is wrong.
        code: for programs.
        retry_after: seconds after which a client should try again.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def is_final(self) -> bool:
        """Whether clients should not send the request again, as they do after errors of a server."""
        return self.code == ABORTED

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "api_error")

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {
            "error": {"message": cut(self.message), "type": self.type, "param": self.param, "code": self.code},
        }

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Anthropic's form."""
        message = cut(self.message)
        if self.code == _CONTEXT:  # words by which agents know that they have to shorten the conversation
            message = f"prompt is too long: {message}"
        kind = _TYPE_OF_413 if self.status == 413 else self.type
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API, there or not."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def error_body(error: ApiError, path: str, request_id: str) -> dict[str, Any]:
    """The body of an error in the form that the clients of a path read."""
    return error.anthropic_body(request_id) if is_anthropic(path) else error.body()


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def of_validation(error: Any) -> ApiError:
    """The error for a body that does not have the form of its endpoint.

    Args:
        error: pydantic's `ValidationError`.
    """
    found: dict[str, str] = {}
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in each["loc"] if not _INTERNAL.match(str(part)))
        found.setdefault(place, cut(each["msg"], 200))
        if len(found) == _MOST_ERRORS:
            break
    # Of a union's members, the one that the value was nearly is the one that has errors within it.
    found = {place: text for place, text in found.items() if not any(each.startswith(f"{place}.") for each in found)}
    message = "; ".join(f"{place}: {text}" if place else text for place, text in found.items())
    return ApiError(400, cut(message, 2000), param=next(iter(found)) or None)


def of_value_error(error: ValueError) -> ApiError:
    """The error for a request that the engine refuses; the field that its message begins with is the parameter."""
    message = re.sub(r"^sampling_params of prompt \d+: ", "", str(error))
    first = re.match(r"[a-z_]+", message)
    param = first[0] if first and first[0] in _PARAMETERS else None
    context = re.search(r"has (\d+) tokens, which leaves no room for one more within max_model_len=(\d+)", message)
    if context:
        return ApiError(400, context_message(int(context[1]), int(context[2])), param="messages", code=_CONTEXT)
    return ApiError(400, message, param=param)


def context_message(num_tokens: int, most: int) -> str:
    return (
        f"This model's maximum context length is {most} tokens, prompt and answer together. However, your request has "
        f"{num_tokens} tokens: shorten it"
    )
