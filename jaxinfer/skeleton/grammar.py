"""The grammar of skeletons, which constrains a model that writes a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.constraints.automaton import RegularAutomaton
from jaxinfer.constraints.characters import Characters
from jaxinfer.constraints.regular import (
    Expression,
    character,
    choice,
    literal,
    marker,
    optional,
    repeat,
    sequence,
    text_without,
)
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.skeleton.plan import DIRECT, END, PLAN

_CONTROLS = Characters(((0x00, 0x1F), (0x7F, 0x9F), (0x2028, 0x2029)))
_SPACES = Characters.of("\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\u00a0\u1680\u2028\u2029\u202f\u205f\u3000")
_WIDE_SPACES = Characters(((0x2000, 0x200A),))
# A bracket in a title could begin [END], which would cut the plan off there.
_BRACKET = Characters.of("[")
_IN_TITLE = Characters.but(_CONTROLS, _BRACKET)
_FIRST_OF_TITLE = Characters.but(_CONTROLS, _BRACKET, _SPACES, _WIDE_SPACES)
_FIRST_OF_TEXT = Characters.but(_SPACES, _WIDE_SPACES)
_FIRST_DIGIT, _DIGIT = Characters.of("123456789"), Characters.of("0123456789")
_DIGITS_OF_LENGTH = 4


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

    def automaton(self, vocabulary: Vocabulary, eos_token_ids: Iterable[int]) -> RegularAutomaton:
        """Build the grammar's automaton over the tokens of a vocabulary.

        Raises:
            ValueError: the vocabulary cannot spell a skeleton, or `eos_token_ids` are not tokens of it.
        """
        return RegularAutomaton(self.expression(), vocabulary, eos_token_ids)

    def expression(self) -> Expression:
        """Return the grammar as an expression over bytes and markers."""
        lines = self._line(self.max_points)
        for number in range(self.max_points - 1, 0, -1):
            lines = sequence(self._line(number), optional(lines))
        plan = sequence(marker(PLAN), literal("\n"), lines)
        direct = sequence(marker(DIRECT), literal("\n"), text_without(END, _FIRST_OF_TEXT))
        start = choice(plan, direct) if self.direct_allowed else plan
        return sequence(start, marker(END))

    def _line(self, number: int) -> Expression:
        length = sequence(character(_FIRST_DIGIT), repeat(character(_DIGIT), 0, _DIGITS_OF_LENGTH - 1))
        tool = choice(*(literal(name) for name in dict.fromkeys(("None", *self.tools))))
        title = sequence(character(_FIRST_OF_TITLE), repeat(character(_IN_TITLE), 0, self.max_title - 1))
        return sequence(
            literal(f"{number}.<"),
            length,
            literal("><"),
            tool,
            literal(">["),
            _dependencies(number),
            literal("]"),
            title,
            literal("\n"),
        )


def _dependencies(number: int) -> Expression:
    """Return the expression of `-`, or of earlier ids with commas between them, as many as there are."""
    none = literal("-")
    if number == 1:
        return none
    earlier = choice(*(literal(str(other)) for other in range(1, number)))
    return choice(none, sequence(earlier, repeat(sequence(literal(","), earlier), 0, number - 2)))
