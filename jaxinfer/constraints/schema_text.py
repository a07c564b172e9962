"""JSON schemas as they are given, made one text: checked for size and depth before anything compiles them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NoReturn

MAX_GRAMMAR_BYTES = 64 * 1024  # of a schema or another grammar, in UTF-8
MAX_SCHEMA_DEPTH = 64  # dicts and lists inside each other
# Greatest `multipleOf`, without its decimal point and zeros at its end: its automaton has as many states.
MAX_MULTIPLE = 50_000

# Keywords whose value is a schema, a list of schemas, or a dict of them. The rest, `enum` say, holds plain values.
_SCHEMA = ("additionalProperties", "items", "contains", "propertyNames", "not", "if", "then", "else", "additionalItems")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ANNOTATIONS = frozenset({"description", "title", "examples", "default", "$schema", "$comment", "deprecated"})
_OPTIONS = "x-guidance"  # the keyword in which llguidance takes options


def schema_text(schema: Any, *, close_objects: bool) -> str:
    """Return the text of a JSON schema, with properties in their order.

    Args:
        schema: a dict, its text, a bool, or a class with `model_json_schema`.
        close_objects: set `additionalProperties` to false in each schema that has properties and does not say.

    Raises:
        ValueError: the schema is none of these, is too large or too deep, or holds values that JSON has not.
    """
    if isinstance(schema, str):
        schema = _parsed(checked_size("json", schema))
    elif isinstance(schema, type) and callable(getattr(schema, "model_json_schema", None)):
        schema = schema.model_json_schema()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(schema, (dict, bool)):
        raise ValueError(
            "structured_outputs.json must be a JSON schema: a dict, its text, a bool or a class with "
            f"model_json_schema, got {schema!r:.200}"
        )
    _check_depth(schema)
    if isinstance(schema, dict) and _OPTIONS in schema:
        raise ValueError(
            f"structured_outputs.json must not have the keyword {_OPTIONS!r}: whitespace is an option beside the schema"
        )
    if close_objects:
        schema = _closed(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs.json must hold JSON values only: {error}") from error
    return checked_size("json", text)


def without_annotations(schema: Any) -> Any:
    """Return a schema without keywords that say nothing of what is valid: descriptions can be long."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}
    return _with_inner(kept, without_annotations)


def checked_size(name: str, text: str) -> str:
    """Return a text that is valid Unicode and not too long.

    Raises:
        ValueError: it is not; the message names `structured_outputs.name`.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"structured_outputs.{name} is not valid Unicode: {error}") from error
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"structured_outputs.{name} must have at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
    return text


def _parsed(text: str) -> Any:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        _refuse_depth()
    except ValueError as error:
        raise ValueError(f"structured_outputs.json must be JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"structured_outputs.json must be the text of an object or a bool, got {text!r:.200}")
    return schema


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _refuse_depth() -> NoReturn:
    raise ValueError(f"structured_outputs.json must have at most {MAX_SCHEMA_DEPTH} levels, got more")


def _check_depth(schema: Any) -> None:
    """Refuse a schema that is too deep, a cyclic one included, or that has a key that is not a string."""
    level, depth, count = [schema], 0, 0
    while level:
        count += len(level)
        if count > MAX_GRAMMAR_BYTES:  # a value takes a byte; without this, shared parts could be very many
            raise ValueError(f"structured_outputs.json must have at most {MAX_GRAMMAR_BYTES} bytes, got more")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                for key in value:
                    if not isinstance(key, str):
                        raise ValueError(f"structured_outputs.json must have strings as keys, got {key!r}")
                _check_multiple(value.get("multipleOf"))
                below += value.values()
            elif isinstance(value, (list, tuple)):
                below += value
            elif not isinstance(value, (str, int, float, type(None))):
                raise ValueError(f"structured_outputs.json must hold JSON values only, got {value!r:.200}")
            else:
                continue
            if depth >= MAX_SCHEMA_DEPTH:
                _refuse_depth()
        level, depth = below, depth + 1


def _check_multiple(value: Any) -> None:
    if isinstance(value, int | float) and math.isfinite(value):
        digits = "".join(map(str, Decimal(str(value)).normalize().as_tuple().digits))
        if len(digits) > len(str(MAX_MULTIPLE)) or int(digits) > MAX_MULTIPLE:
            raise ValueError(
                f"structured_outputs.json: multipleOf {value!r:.40} has too many digits, it must be at most "
                f"{MAX_MULTIPLE} times a power of ten"
            )


def _closed(schema: Any) -> Any:
    """Return a copy of a schema in which objects that have properties take no others, unless they say so."""
    if not isinstance(schema, dict):
        return schema
    found = _with_inner(schema, _closed)
    if ("properties" in found or "patternProperties" in found) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found


def _with_inner(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a schema, with each schema directly inside it as `change` returns it."""
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[keyword] = {name: change(inner) for name, inner in value.items()}
        elif keyword in _SCHEMAS and isinstance(value, (list, tuple)):
            found[keyword] = [change(inner) for inner in value]
        elif keyword in _SCHEMA:
            found[keyword] = change(value)
        else:
            found[keyword] = value
    return found
