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


async def read_model[T](request: HttpRequest, model: type[T], most_bytes: int) -> T:
    """Read a body as a model.

    Raises:
        ApiError: it is not JSON, too large, or not of the model's form.
    """
    return validated(model, await read_json(request, most_bytes))


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


async def read_json(request: HttpRequest, most_bytes: int) -> dict[str, Any]:
    """Read a body that is a JSON object.

    Raises:
        ApiError: it is none, or too large.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(400, f"the content type must be application/json, got {kind or 'none'}")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > most_bytes:
                raise ApiError(413, f"the body has more than {most_bytes} bytes")
    except ClientDisconnect as error:
        raise ApiError(400, "the client has left") from error
    return await asyncio.to_thread(_parsed, bytes(body)) if len(body) > _LONG else _parsed(bytes(body))


def _parsed(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise ApiError(400, "the body is empty: a JSON object is needed")
    try:
        text = body.decode()
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles)
        _check_depth(found)
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


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {double[:80]!r} occurs twice in one object")
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEP):
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
