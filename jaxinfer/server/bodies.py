"""Bodies of requests: JSON that is read strictly, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.server.errors import ApiError, of_validation
from jaxinfer.server.json_text import MOST_VALUES, check_characters, loads
from jaxinfer.server.packages import ClientDisconnect, HttpRequest, ValidationError
from jaxinfer.server.service import Service

# Longer ones are read beside the event loop.
_LONG = 1 << 14
_DEEP = 200
_MOST_SECONDS = 60  # between two pieces of a body
# Objects, their fields, lists, and what is in them beside numbers: a model reads so many in a tenth of a second.
_MOST_PARTS = 1 << 16


async def read_body[T](service: Service, request: HttpRequest, model: type[T]) -> T:
    """Read a body as a model.

    Raises:
        ApiError: no requests are taken now, or the body is not JSON, too large, or not of the model's form.
    """
    return await read_body_as(service, request, model, lambda found: found)


async def read_body_as[T, R](service: Service, request: HttpRequest, model: type[T], then: Callable[[T], R]) -> R:
    """Read a body as a model, and return what is made of it.

    Args:
        then: makes it; any thread may call it.

    Raises:
        ApiError: as for `read_body`, or by `then`.
    """
    service.check_ready()
    body = await _read(request, service.settings.max_body_bytes)

    def found() -> R:
        return then(validated(model, _parsed(body)))

    return await asyncio.to_thread(found) if len(body) > _LONG else found()


def validated[T](model: type[T], given: Mapping[str, Any]) -> T:
    """Read an object as a model.

    Raises:
        ApiError: it is not of the model's form.
    """
    try:
        return model.model_validate(given)  # pyright: ignore[reportAttributeAccessIssue]
    except ValidationError as error:
        raise of_validation(error) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error


async def _read(request: HttpRequest, most_bytes: int) -> bytearray:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(400, f"the content type must be application/json, got {kind or 'none'}")
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdigit() and len(told) < 20 and int(told) > most_bytes:
        raise ApiError(413, f"the body has more than {most_bytes} bytes")
    body = bytearray()
    pieces = request.stream()
    try:
        while True:
            async with asyncio.timeout(_MOST_SECONDS):
                piece = await anext(pieces, None)
            if piece is None:
                break
            body += piece
            if len(body) > most_bytes:
                raise ApiError(413, f"the body has more than {most_bytes} bytes")
    except TimeoutError as error:
        raise ApiError(408, f"nothing more of the body has come for {_MOST_SECONDS} seconds") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client has left") from error
    return body


def _parsed(body: bytearray) -> dict[str, Any]:
    if not body or body.isspace():
        raise ApiError(400, "the body is empty: a JSON object is needed")
    try:
        text = body.decode()
        found = loads(text, MOST_VALUES)
        _check_parts(found)
        if "\\ud" in text or "\\uD" in text:
            check_characters(found)
    except UnicodeError as error:
        raise ApiError(400, "the body is not UTF-8, or has half of a surrogate pair") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(found).__name__}")
    return found


def _check_parts(value: Any) -> None:
    level, count = [value], 0
    for _ in range(_DEEP):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                count += len(each)
                inner += each.values()
            elif isinstance(each, list):
                count += 1 + sum(not isinstance(one, int | float) for one in each)
                inner += each
        if count > _MOST_PARTS:
            raise ApiError(400, f"the body has more than {_MOST_PARTS} fields, lists and texts in lists")
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return
    raise RecursionError
