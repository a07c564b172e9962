"""Structured output as a request asks for it: one grammar, and how JSON is laid out; names and meanings are vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxinfer.constraints.schema_text import checked_size, schema_text
from jaxinfer.field_checks import fields_of

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OFF = ("json_object", False)  # not asked for
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, kw_only=True, eq=False)
class StructuredOutputsParams:
    """Grammar of a request's output: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    The output is a text that the grammar accepts, then an end-of-sequence token; it is a part of such a text if
    `max_tokens` cuts it. A grammar that never ends is cut like that too: a schema whose object requires itself, or a
    number, which may have digits without end. Two instances are equal if their `key` is.

    Args:
        json: a JSON schema: a dict, its text, a bool, or a class that has `model_json_schema`, as Pydantic models do.
            Properties are written in the order of `properties`. Keywords that cannot be enforced are refused when the
            grammar is compiled; those that say nothing about values (`title`, say) are ignored.
        regex: a regular expression that the whole output matches. As in Python, `\\d`, `\\w` and `\\s` are Unicode's
            classes; look-around, word boundaries and backreferences are refused.
        choice: the texts of which the output is one.
        grammar: a context-free grammar in llguidance's variant of Lark, with a rule `start`.
        json_object: True: any JSON object.
        whitespace_pattern: for `json` and `json_object`: a regular expression of the whitespace that may be between
            two parts of the JSON text; None: up to 20 characters.
        disable_any_whitespace: for `json` and `json_object`: write no whitespace but after commas and colons, one
            space, as `json.dumps` does.
        disable_additional_properties: for `json`: set `additionalProperties` to false in each schema that has
            `properties` or `patternProperties` and does not say.
        reasoning_tags: the tags around reasoning with which the output may begin: the grammar holds for what comes
            after it and up to 8 characters of whitespace. With an empty first tag the output begins within reasoning,
            as it does where a prompt ends with that tag. None: the grammar holds from the first token on.

    Raises:
        ValueError: not exactly one kind is given, an option does not apply to it, a value is not of its type, or a
            grammar has more than 64 KB of text or a schema more than 64 levels.
    """

    json: dict[str, Any] | str | bool | type | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_tags: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise ValueError(f"structured_outputs.json_object must be True, False or None, got {self.json_object!r}")
        given = self._given
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(_KINDS)}, got {found}")
        self._check_options()
        text = self.text
        if self.kind == "json":
            object.__setattr__(self, "json", json.loads(text))
        elif self.kind == "choice":
            object.__setattr__(self, "choice", json.loads(text))

    @property
    def kind(self) -> str:
        """The name of the kind that is given."""
        return self._given[0]

    @cached_property
    def text(self) -> str:
        """The schema, the regular expression, the grammar, or the choices as a JSON list."""
        match self.kind:
            case "json":
                return schema_text(self.json, close_objects=self.disable_additional_properties)
            case "json_object":
                return _ANY_OBJECT
            case "choice":
                return self._text_of_choice()
        text = getattr(self, self.kind)
        if not isinstance(text, str) or not text:
            raise ValueError(f"structured_outputs.{self.kind} must be a non-empty string, got {text!r}")
        return checked_size(self.kind, text)

    @property
    def key(self) -> tuple[str, str, str | None, bool, tuple[str, str] | None]:
        """The kind, its text with the properties in their order, and the options that the text does not hold."""
        return self.kind, self.text, self.whitespace_pattern, self.disable_any_whitespace, self.reasoning_tags

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams:
        """Return the parameters that are given as such, or as a dict of keyword arguments.

        Raises:
            ValueError: `given` is neither, a key is not a field, or a value is refused.
        """
        if isinstance(given, cls):
            return given
        return cls(**fields_of(cls, "structured_outputs", given))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructuredOutputsParams) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def _given(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) is not None and (name, getattr(self, name)) != _OFF]

    def _check_options(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"structured_outputs.{name} must be True or False, got {getattr(self, name)!r}")
        self._check_tags()
        pattern = self.whitespace_pattern
        if pattern is not None and not (isinstance(pattern, str) and pattern):
            raise ValueError(
                f"structured_outputs.whitespace_pattern must be a non-empty string or None, got {pattern!r}"
            )
        if pattern is not None:
            checked_size("whitespace_pattern", pattern)
        if pattern is not None and self.disable_any_whitespace:
            raise ValueError(
                f"structured_outputs.whitespace_pattern={pattern!r} and disable_any_whitespace=True exclude each other"
            )
        if self.kind not in ("json", "json_object"):
            for name in ("whitespace_pattern", "disable_any_whitespace"):
                if getattr(self, name):
                    raise ValueError(
                        f"structured_outputs.{name}={getattr(self, name)!r} applies to json and json_object, "
                        f"got {self.kind}"
                    )
        if self.disable_additional_properties and self.kind != "json":
            raise ValueError(f"structured_outputs.disable_additional_properties=True applies to json, got {self.kind}")

    def _check_tags(self) -> None:
        tags = self.reasoning_tags
        if tags is None:
            return
        is_pair = isinstance(tags, (list, tuple)) and len(tags) == 2 and all(isinstance(tag, str) for tag in tags)
        if not is_pair or not tags[1]:
            raise ValueError(
                f"structured_outputs.reasoning_tags must be two strings, the second not empty, or None, got {tags!r}"
            )
        checked_size("reasoning_tags", "".join(tags))
        object.__setattr__(self, "reasoning_tags", tuple(tags))

    def _text_of_choice(self) -> str:
        choice = self.choice
        if not isinstance(choice, (list, tuple)) or not choice:
            raise ValueError(f"structured_outputs.choice must be a non-empty list of strings, got {choice!r}")
        seen: set[str] = set()
        for text in choice:
            if not isinstance(text, str) or not text:
                raise ValueError(f"structured_outputs.choice must hold non-empty strings, got {text!r}")
            if text in seen:
                raise ValueError(f"structured_outputs.choice must hold each text once, got {text!r} twice")
            seen.add(text)
        return checked_size("choice", json.dumps(list(choice), ensure_ascii=False))
