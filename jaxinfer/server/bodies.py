"""Bodies of requests: JSON that is read strictly, within limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.server.errors import ApiError, of_validation
from jaxinfer.server.packages import ClientDisconnect, HttpRequest, ValidationError

# Longer ones are parsed beside the event loop.
_LONG = 1 << 18
_DEEP = 200
_MOST_SECONDS = 60  # between two pieces of a body
# Objects, their fields, and lists that a body may have: to read one as a model takes 10 microseconds, and meanwhile
# nothing else runs.
_MOST_PARTS = 1 << 16


async def read_model[T](request: HttpRequest, model: type[T], most_bytes: int) -> T:
    """Read a body as a model.

    Raises:
        ApiError: it is not JSON, too large, or not of the model's form.
    """
    body = await _read(request, most_bytes)
    # Numbers and texts in long lists are read one by one.
    return await asyncio.to_thread(_read_as, model, body) if len(body) > _LONG else _read_as(model, body)


def _read_as[T](model: type[T], body: bytes) -> T:
    return validated(model, _parsed(body))


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


async def _read(request: HttpRequest, most_bytes: int) -> bytes:
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
    return bytes(body)


def _parsed(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise ApiError(400, "the body is empty: a JSON object is needed")
    try:
        text = body.decode()
        found = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=_without_doubles)
        _check_parts(found)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ApiError(400, "the body is not UTF-8, or has half of a surrogate pair") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(found).__name__}")
    return found


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {double[:80]!r} occurs twice in one object")
    return found


def _check_parts(value: Any) -> None:
    level, count = [value], 0
    for _ in range(_DEEP):
        count += sum(len(each) if isinstance(each, dict) else 1 for each in level)
        if count > _MOST_PARTS:
            raise ApiError(400, f"the body has more than {_MOST_PARTS} fields and lists")
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise RecursionError
