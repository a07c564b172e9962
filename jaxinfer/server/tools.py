"""The tools of a conversation: which may be called, and in which format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.server.errors import ApiError
from jaxinfer.server.harmony_grammar import grammar_of_messages
from jaxinfer.server.parse.formats import HARMONY, CallFormat
from jaxinfer.server.tool_grammar import grammar_of_answers, grammar_of_calls

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def schema_of(answers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of an answer that is {"json": schema} or {"json_object": True}."""
    return answers.get("json", _ANY_OBJECT)


def _check_form(name: str, schema: Mapping[str, Any]) -> None:
    required = schema.get("required") or []
    has_form = isinstance(required, list) and all(isinstance(each, str) for each in required)
    if not has_form or not isinstance(schema.get("properties") or {}, Mapping):
        raise ApiError(
            400, f"parameters of {name}: properties must be an object, and required a list of names", "tools"
        )


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
        self._are_strict: dict[str, bool] = {}
        for tool in given or ():
            if tool.function.name in self.schemas:
                raise ApiError(400, f"tools has {tool.function.name} twice", "tools")
            schema = {
                key: value for key, value in (tool.function.parameters or _ANY_OBJECT).items() if value is not None
            }
            _check_form(tool.function.name, schema)
            self.schemas[tool.function.name] = schema
            self._are_strict[tool.function.name] = bool(tool.function.strict)
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

    @staticmethod
    def _loose(calls: CallFormat, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema to which any call keeps that names the tool's parameters."""
        if calls.body != "xml":
            return _ANY_OBJECT
        return {"type": "object", "properties": {key: {"type": "string"} for key in schema.get("properties", ())}}

    @property
    def must_call(self) -> bool:
        """Whether an answer is a call in any case."""
        return self.name is not None or self.choice == "required"

    @property
    def _wanted(self) -> dict[str, Mapping[str, Any]]:
        """Schemas of the tools of which an answer has to call one."""
        return self.schemas if self.name is None else {self.name: self.schemas[self.name]}

    def _grammar_of_messages(self, answers: Mapping[str, Any] | None) -> str | None:
        if self.must_call:
            return grammar_of_messages(self._wanted, must_call=True)
        if answers is None and not any(self._are_strict.values()):
            return None
        schemas = {name: schema if self._are_strict[name] else _ANY_OBJECT for name, schema in self.schemas.items()}
        answer = None if answers is None else schema_of(answers)
        return grammar_of_messages(schemas, must_call=False, answer=answer)

    def grammar(self, answers: Mapping[str, Any] | None = None) -> str | None:
        """The grammar of an answer, in Lark's notation: of one that has to call a tool, or whose calls of strict tools
        keep to their schemas; None: any text will do.

        Args:
            answers: what an answer without calls has to be: {"json": schema} or {"json_object": True}; None: any text.
        """
        if self.calls is None:
            return None
        is_single = self.most_calls == 1
        if self.calls is HARMONY:
            return self._grammar_of_messages(answers)
        if self.must_call:
            return grammar_of_calls(self.calls, self._wanted, is_single=is_single)
        schemas = {
            name: schema if self._are_strict[name] else self._loose(self.calls, schema)
            for name, schema in self.schemas.items()
        }
        if answers is not None and not self.calls.open:
            raise ApiError(
                400, "tools go without response_format here: in this model's format a call is JSON as an answer is",
                "response_format",
            )  # fmt: skip
        if answers is not None:
            return grammar_of_calls(self.calls, schemas, is_single=is_single, answer=schema_of(answers))
        if not any(self._are_strict.values()):
            return None
        return grammar_of_answers(self.calls, schemas, is_single=is_single)
