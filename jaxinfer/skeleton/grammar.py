"""The grammar of skeletons, which constrains a model that writes a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from jaxinfer.skeleton.plan import DIRECT, END, PLAN

# Characters as classes of regular expressions. A bracket in a title could begin [END], which would cut the plan off.
_CONTROLS = r"\x00-\x1F\x7F-\x9F\u2028\u2029"
_SPACES = r"\t\n\v\f\r\x1C-\x1F \x85\u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000"
_DIGITS_OF_LENGTH = 4
_END, _ANY_TAG = r"\[END\]", r"\[(PLAN|DIRECT|END)\]"


@dataclass(frozen=True)
class SkeletonGrammar:
    """The plan protocol: `[PLAN]` and lines `ID.<Length><Tool>[Deps]Title`, or `[DIRECT]` and a text; then `[END]`.

    Ids count up from 1. A length has 1 to 4 digits, the first not 0. A tool is None or one that is given. Dependencies
    are `-` or ids of earlier lines. A title starts with a non-space character, and has no line break and no `[`.
    `parse_skeleton` reads every text that is accepted, with every part in its place.

    Args:
        direct_allowed: whether the model may answer without a plan.
        max_points: most lines of a plan.
        max_title: most characters of a title.
        tools: names of tools that lines may have.

    Raises:
        ValueError: a number is not positive, or a tool's name cannot be part of a line.
    """

    direct_allowed: bool = True
    max_points: int = 20
    max_title: int = 80
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_points", "max_title"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for tool in self.tools:
            well_formed = tool.isprintable() and tool == tool.strip() and not set(tool) & set("<>[]")
            if not tool or not well_formed or tool[0].isdigit():
                raise ValueError(f"tools must be names without brackets that begin with no digit, got {tool!r}")

    def lark(self, markers: Mapping[str, int]) -> str:
        """Return the grammar as text, for `StructuredOutputsParams(grammar=...)`.

        Args:
            markers: tokens of the protocol's tags, which are written as these tokens; a tag without one is plain text.
        """
        plan, direct, end = (_tag(tag, markers) for tag in (PLAN, DIRECT, END))
        tools = " | ".join(json.dumps(name, ensure_ascii=False) for name in dict.fromkeys(("None", *self.tools)))
        # A text that had a tag in it would be read as something else. A tag that is plain text belongs to the same
        # terminal, because the lexer takes the longest match.
        is_token = END in markers
        closing, more = ("", "*") if is_token else (_END, "+")
        text = rf"/[^{_SPACES}](.|\n)*{closing}/ & ~/(.|\n)*{_ANY_TAG}(.|\n){more}/"
        rules = [
            "start: plan | direct" if self.direct_allowed else "start: plan",
            f'plan: {plan} "\\n" line1 {end}',
            f"LENGTH: /[1-9][0-9]{{0,{_DIGITS_OF_LENGTH - 1}}}/",
            f"TOOL: {tools}",
            rf"TITLE: /[^\[{_CONTROLS}{_SPACES}][^\[{_CONTROLS}]{{0,{self.max_title - 1}}}/",
        ]
        if self.direct_allowed:
            rules += [f'direct: {direct} "\\n" TEXT {end if is_token else ""}', f"TEXT: {text}"]
        for number in range(1, self.max_points + 1):
            following = f" [line{number + 1}]" if number < self.max_points else ""
            line = f'"{number}.<" LENGTH "><" TOOL ">[" {_dependencies(number)} "]" TITLE "\\n"'
            rules.append(f"line{number}: {line}{following}")
        return "\n".join(rules) + "\n"


def _tag(tag: str, markers: Mapping[str, int]) -> str:
    return f"<[{markers[tag]}]>" if tag in markers else json.dumps(tag)


def _dependencies(number: int) -> str:
    """Return the terminal of `-`, or of earlier ids with commas between them, as many as there are."""
    if number == 1:
        return '"-"'
    earlier = f"({'|'.join(map(str, range(1, number)))})"
    return f"/-|{earlier}(,{earlier}){{0,{number - 2}}}/"
