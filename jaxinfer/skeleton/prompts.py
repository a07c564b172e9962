"""Prompts of Skeleton-of-Thought: for the skeleton of an answer, and for each of its points.

Every request continues the conversation in which the model wrote its plan. The points then share all but the last
turn, and most of this prefix was computed with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.skeleton.plan import Skeleton, SkeletonPoint, parse_outline, parse_skeleton, point_text

type Messages = list[dict[str, str]]

PROTOCOLS = ("plan", "outline")


class SkeletonPrompts(Protocol):
    """Maker of the prompts for a skeleton and for each of its points."""

    @property
    def is_plan(self) -> bool:
        """Whether the skeleton is in the plan protocol, which a grammar can enforce."""
        ...

    def ask_skeleton(self, question: str) -> Messages: ...

    def parse(self, text: str, budget: int) -> Skeleton:
        """Parse the skeleton that the model wrote; see `parse_skeleton` for `budget`."""
        ...

    def ask_point(
        self, question: str, written: str, skeleton: Skeleton, point: SkeletonPoint, texts: Mapping[int, str]
    ) -> Messages:
        """Return the conversation that ends with the request for a point.

        Args:
            written: the text of the skeleton, as the model wrote it.
            texts: of finished points, by id; the prompt shows those that the point depends on.
        """
        ...


@dataclass(frozen=True)
class PlanPrompts:
    """The plan protocol: `[PLAN]`, lines `1.<40><None>[-]Title`, `[END]`; or `[DIRECT]` and the answer."""

    system: str = "Answer with [PLAN] and a list of points, or with [DIRECT] and one short answer."
    is_plan = True

    def ask_skeleton(self, question: str) -> Messages:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": question}]

    def parse(self, text: str, budget: int) -> Skeleton:
        return parse_skeleton(text, budget)

    def ask_point(
        self, question: str, written: str, skeleton: Skeleton, point: SkeletonPoint, texts: Mapping[int, str]
    ) -> Messages:
        asked = [_shown(point, texts), skeleton.ask_point(point)]
        return [*self.ask_skeleton(question), *_turns(written, "\n".join(part for part in asked if part))]


@dataclass(frozen=True)
class OutlinePrompts:
    """A numbered list, for models that know no protocol (Skeleton-of-Thought, arXiv 2307.15337, in our own words)."""

    skeleton: str = (
        "Plan the answer to the question below, do not write it yet. Give 3 to 10 points as a numbered list, each of 3 "
        "to 5 words on a line of its own, and nothing else.\n\nQuestion: {question}"
    )
    point: str = (
        "Now write point {number}, and no other: 1 or 2 short sentences that say what belongs to “{title}”. Do not "
        "repeat the title."
    )
    is_plan = False

    def ask_skeleton(self, question: str) -> Messages:
        return [{"role": "user", "content": self.skeleton.format(question=question)}]

    def parse(self, text: str, budget: int) -> Skeleton:
        return parse_outline(text)

    def ask_point(
        self, question: str, written: str, skeleton: Skeleton, point: SkeletonPoint, texts: Mapping[int, str]
    ) -> Messages:
        asked = [_shown(point, texts), self.point.format(number=point.id, title=point.title)]
        return [*self.ask_skeleton(question), *_turns(written, "\n".join(part for part in asked if part))]


def _turns(written: str, request: str) -> Messages:
    return [{"role": "assistant", "content": written}, {"role": "user", "content": request}]


def _shown(point: SkeletonPoint, texts: Mapping[int, str]) -> str:
    """Return the texts of the points that this one depends on."""
    return "\n".join(f"Point {number}: {point_text(texts[number])}" for number in point.dependencies)
