"""The tools of a conversation: which may be called, in which format, and the grammar of an answer that calls one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.constraints.schema_text import schema_text
from jaxinfer.server.errors import ApiError
from jaxinfer.server.parse.formats import CallFormat

_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Tools:
    """Tools of one request.

    Args:
        given: as the body has them; None: there are none.
        choice: "none", "auto", "required", or the name of a function; None: "auto" if there are tools.
        is_parallel: whether an answer may have several calls.
        calls: the format of the model's calls; None: it has none that is known.

    Raises:
        ApiError: the body asks for what does not go together, or the model has no calls.
    """

    def __init__(
        self, given: Sequence[Any] | None, choice: Any, *, is_parallel: bool | None, calls: CallFormat | None
    ) -> None:
        if given is not None and not given:
            raise ApiError(400, "tools is empty: leave it out, or name at least one", "tools")
        self.schemas: dict[str, Mapping[str, Any]] = {}
        for tool in given or ():
            if tool.function.name in self.schemas:
                raise ApiError(400, f"tools has {tool.function.name} twice", "tools")
            self.schemas[tool.function.name] = tool.function.parameters or _ANY_OBJECT
        self.choice = choice if choice is not None else ("auto" if self.schemas else "none")
        self.name: str | None = None
        if not isinstance(self.choice, str):
            self.name = self.choice.function.name
            if self.name not in self.schemas:
                raise ApiError(400, f"tool_choice names {self.name}, which tools does not have", "tool_choice")
        elif self.choice != "none" and not self.schemas:
            raise ApiError(400, f"tool_choice={self.choice!r} needs tools", "tool_choice")
        self.are_callable = self.choice != "none"
        if self.are_callable and calls is None:
            raise ApiError(
                400, "tools are not served for this model: its chat template has no tool calls that are known", "tools"
            )
        self.calls = calls if self.are_callable else None
        self.most_calls = 1 if is_parallel is False or self.name is not None else None

    @property
    def must_call(self) -> bool:
        """Whether an answer is a call in any case."""
        return self.name is not None or self.choice == "required"

    def grammar(self) -> str | None:
        """The grammar, in Lark's notation, of an answer that has to call a tool; None: it need not."""
        if not self.must_call or self.calls is None:
            return None
        names = [self.name] if self.name is not None else list(self.schemas)
        rules = [_rule_of_call(self.calls, number, name, self.schemas[name]) for number, name in enumerate(names)]
        one = " | ".join(f"call_{number}" for number in range(len(names)))
        opening, between, closing = _frame(self.calls)
        more = "" if self.most_calls == 1 else f" ({between} call)*"
        return "\n".join([f"start: {opening} call{more} {closing}", f"call: {one}", *rules]) + "\n"


def _frame(calls: CallFormat) -> tuple[str, str, str]:
    """The text around all calls, and between two, as right sides of rules."""
    if calls.body == "array":
        return _text(f"{calls.open}["), _text(", "), _text(f"]{calls.close}")
    if calls.open:
        return "", _text("\n"), ""
    return "", _text(f"{calls.separator} "), ""


def _rule_of_call(calls: CallFormat, number: int, name: str, schema: Mapping[str, Any]) -> str:
    if calls.body == "xml":
        return _rule_of_tags(calls, number, name, schema)
    key = "parameters" if calls.name.startswith("llama") else "arguments"
    before, after = f'{{"name": {json.dumps(name)}, "{key}": ', "}"
    if calls.body == "json" and calls.open:
        before, after = f"{calls.open}\n{before}", f"{after}\n{calls.close}"
    return f"call_{number}: {_text(before)} arguments_{number} {_text(after)}\n" + _json_rule(
        f"arguments_{number}", schema
    )


def _rule_of_tags(calls: CallFormat, number: int, name: str, schema: Mapping[str, Any]) -> str:
    """The rules of a call whose arguments are tags, in the order of the schema."""
    required = set(schema.get("required", ()))
    parts, rules = [], []
    for place, (key, inner) in enumerate(schema.get("properties", {}).items()):
        rule = f"value_{number}_{place}"
        is_string = isinstance(inner, Mapping) and inner.get("type") == "string" and "enum" not in inner
        rules.append(f"{rule}: /[^<]*/" if is_string else _json_rule(rule, inner))
        part = f"{_text(f'<parameter={key}>{chr(10)}')} {rule} {_text(f'{chr(10)}</parameter>{chr(10)}')}"
        parts.append(part if key in required else f"({part})?")
    before, after = f"{calls.open}\n<function={name}>\n", f"</function>\n{calls.close}"
    return "\n".join([f"call_{number}: {_text(before)} {' '.join(parts)} {_text(after)}", *rules])


def _json_rule(name: str, schema: Any) -> str:
    """The rule of a value that is JSON by a schema, written as the chat templates write it."""
    checked = json.loads(schema_text(schema, close_objects=False))
    if isinstance(checked, dict):
        checked["x-guidance"] = _AS_WRITTEN
    return f"{name}: %json {json.dumps(checked, ensure_ascii=False)}"


def _text(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
