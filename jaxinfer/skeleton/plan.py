"""Skeletons: plans of answers whose points are decoded in parallel, parsed from a model's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxinfer.tokenizer import Tokenizer

PLAN, DIRECT, ANSWER, END = "[PLAN]", "[DIRECT]", "[ANSWER]", "[END]"
SHORTEST = 16  # least expected tokens of a point

_TAG = re.compile(r"\[(?:PLAN|DIRECT)\]")
_DEPENDENCIES = r"[\[【]\s*(?:[-–—]|[Nn]one|[\d,，、;\s]*)\s*[\]】]"
_TOOL = r"<\s*[^<>\d\s][^<>]*>"
_LINE = re.compile(
    rf"""
    \s*(?P<id>\d{{1,9}})\s*[.:、．]
    (?:\s*<\s*(?P<angle>\d{{1,9}})\s*>
     | \s*（\s*(?P<round>\d{{1,9}})\s*）
     | (?P<bare>\d{{1,9}})(?!\d)
     | \s*(?P<apart>\d{{1,9}})(?=\s*(?:{_TOOL}|{_DEPENDENCIES}))
    )?
    \s*(?P<tool>{_TOOL})?
    \s*(?P<dependencies>{_DEPENDENCIES})?
    (?P<title>.*)
    """,
    re.VERBOSE,
)
_OUTLINE_LINE = re.compile(r"^[^\S\n]*(\d{1,9})\.(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class SkeletonPoint:
    """One point of a skeleton.

    Args:
        id: its number, by which others depend on it.
        title: what it is about; neither empty nor with spaces around it.
        length: expected tokens of its text, between `SHORTEST` and the budget; None where the plan does not say.
        tool: name of the tool that it wants to use, if any.
        dependencies: ids of points that must be written before it.
        stated_length: the length as the plan states it. Prompts repeat it, so that a model is asked in its own words.
    """

    id: int
    title: str
    length: int | None = None
    tool: str | None = None
    dependencies: tuple[int, ...] = ()
    stated_length: int | None = None


@dataclass(frozen=True)
class Skeleton:
    """The points of a plan in their order, or a direct answer.

    Raises:
        ValueError: there are both or neither, two points share an id, or dependencies are unknown or circular.
    """

    points: tuple[SkeletonPoint, ...] = ()
    answer: str | None = None

    def __post_init__(self) -> None:
        if bool(self.points) == (self.answer is not None):
            raise ValueError(f"a skeleton has points or an answer, got {self.points!r} and {self.answer!r}")
        if len({point.id for point in self.points}) < len(self.points):
            raise ValueError(f"points must have different ids, got {[point.id for point in self.points]}")
        self.waves()

    @property
    def is_direct(self) -> bool:
        """Whether the model chose to answer without a plan."""
        return self.answer is not None

    @property
    def is_parallel(self) -> bool:
        """Whether any two points can be decoded at the same time."""
        return any(len(wave) > 1 for wave in self.waves())

    def waves(self) -> tuple[tuple[SkeletonPoint, ...], ...]:
        """Return the points by topological level: points of a wave depend on points of earlier waves only.

        Raises:
            ValueError: dependencies are unknown or circular.
        """
        waves: list[tuple[SkeletonPoint, ...]] = []
        written: set[int] = set()
        waiting = self.points
        while waiting:
            wave = tuple(point for point in waiting if written.issuperset(point.dependencies))
            if not wave:
                raise ValueError(f"points {[point.id for point in waiting]} have dependencies that never are written")
            waves.append(wave)
            written.update(point.id for point in wave)
            waiting = tuple(point for point in waiting if point.id not in written)
        return tuple(waves)

    def cleaned(self) -> str:
        """Return the skeleton as prompts of points show it: a line `1. Title` for each point."""
        return "\n".join(f"{point.id}. {point.title}" for point in self.points)

    def ask_point(self, point: SkeletonPoint) -> str:
        """Return the request for one point, for a conversation that has the plan already."""
        length = f" (about {point.stated_length} tokens)" if point.stated_length else ""
        return f"Write point {point.id}: {point.title}{length}."

    def point_prompt(self, task: str, point: SkeletonPoint) -> str:
        """Return the user turn that asks for one point; all but its last line is common to all points."""
        return f"Task: {task}\nPlan:\n{self.cleaned()}\n{self.ask_point(point)}"

    def merge(self, texts: Mapping[int, str]) -> str:
        """Return the final answer: `1. Title: text` for every point in the plan's order.

        Args:
            texts: the model's text for each point, by id, with or without the frame of [ANSWER] and [END].

        Raises:
            ValueError: a point has no text.
        """
        if self.answer is not None:
            return self.answer
        missing = [point.id for point in self.points if point.id not in texts]
        if missing:
            raise ValueError(f"points {missing} have no text")
        return "\n".join(f"{point.id}. {point.title}: {point_text(texts[point.id])}" for point in self.points)


def parse_skeleton(text: str, budget: int) -> Skeleton:
    """Parse a skeleton in the plan protocol; a text that is not a plan is a direct answer.

    A leading thought is cut. The body runs from the first [PLAN] or [DIRECT] to [END] or the end of the text; without
    either, the whole text is the answer. Lines of a plan that are not points are skipped, as are points without a
    title and points whose id is taken.

    Args:
        text: the decoded output.
        budget: most tokens that one point may have, at least 1.

    Raises:
        ValueError: the budget is not positive.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    text = _without_thought(text)
    tag = None if text.lstrip().startswith("<think>") else _TAG.search(text)  # a thought that never ended
    if tag is None:
        return Skeleton(answer=text.strip())
    body = text[tag.end() :].partition(END)[0]
    points: dict[int, SkeletonPoint] = {}
    if tag[0] == PLAN:
        for line in body.split("\n"):
            point = _parse_line(line, budget)
            if point is not None:
                points.setdefault(point.id, point)
    if not points:
        return Skeleton(answer=body.strip())
    return Skeleton(_with_sound_dependencies(points))


def parse_outline(text: str) -> Skeleton:
    """Parse a plain numbered list (Ning et al. 2023, Skeleton-of-Thought), for models without the plan protocol.

    Every line `1. text` is a point, the first of each number; without any, the text is a direct answer.
    """
    text = _without_thought(text)
    points: dict[int, SkeletonPoint] = {}
    for number, title in _OUTLINE_LINE.findall(text):
        if title.strip():
            points.setdefault(int(number), SkeletonPoint(int(number), title.strip()))
    return Skeleton(tuple(points.values())) if points else Skeleton(answer=text.strip())


def point_text(text: str) -> str:
    """Return a point's text without a leading thought and the frame of [ANSWER] and [END]."""
    return _without_thought(text).strip().removeprefix(ANSWER).partition(END)[0].strip()


class StreamedPointText:
    """What `point_text` makes of a point's text, while the text comes in pieces.

    Whatever a further piece may show to be frame, thought or space at the end is held back. Only a thought that the
    prompt has opened is not known before its end.
    """

    def __init__(self) -> None:
        self._text, self._num_sent = "", 0

    def add(self, text: str, *, is_last: bool) -> str:
        """Return what a further piece adds."""
        self._text += text
        if is_last:
            found = point_text(self._text)
        elif _may_begin(_without_thought(self._text).lstrip()):
            found = ""
        else:
            held = next(length for length in range(len(END) - 1, -1, -1) if self._text.endswith(END[:length]))
            found = point_text(self._text[: len(self._text) - held])
        new, self._num_sent = found[self._num_sent :], max(self._num_sent, len(found))
        return new


def _may_begin(text: str) -> bool:
    """Whether nothing of a text is known to be a point's own: it may be the beginning of a frame or of a thought."""
    return any(opening.startswith(text) for opening in (ANSWER, "<think>")) or (
        text.startswith("<think>") and "</think>" not in text
    )


def _without_thought(text: str) -> str:
    """Return the text after a leading thought, whose opening tag some chat templates put into the prompt."""
    before, closing, after = text.partition("</think>")
    before = before.lstrip()
    leads = before.startswith("<think>") or "<think>" not in before and not before.startswith((PLAN, DIRECT, ANSWER))
    return after if closing and leads else text


def _parse_line(line: str, budget: int) -> SkeletonPoint | None:
    match = _LINE.match(line)
    title = match["title"].strip() if match is not None else ""
    if match is None or not title:
        return None
    digits = match["angle"] or match["round"] or match["bare"] or match["apart"]
    stated = int(digits) if digits else None
    tool = match["tool"][1:-1].strip() if match["tool"] else None
    mentioned = map(int, re.findall(r"\d{1,9}", match["dependencies"] or ""))
    return SkeletonPoint(
        id=int(match["id"]),
        title=title,
        length=None if stated is None else min(max(stated, SHORTEST), budget),
        tool=None if tool is None or tool.lower() == "none" else tool,
        dependencies=tuple(dict.fromkeys(mentioned)),
        stated_length=stated,
    )


def _with_sound_dependencies(points: Mapping[int, SkeletonPoint]) -> tuple[SkeletonPoint, ...]:
    """Return the points without dependencies on themselves, on unknown points and in circles.

    Circles are broken in the order of ids: in every circle, the point with the smallest id does not wait.
    """
    waits_for = {
        point.id: [other for other in point.dependencies if other in points and other != point.id]
        for point in points.values()
    }
    for own in sorted(waits_for):
        waits_for[own] = [other for other in waits_for[own] if own not in _reachable(other, waits_for)]
    return tuple(replace(point, dependencies=tuple(waits_for[point.id])) for point in points.values())


def _reachable(start: int, waits_for: Mapping[int, list[int]]) -> set[int]:
    """Return the ids of all points that `start` waits for, directly or not."""
    found: set[int] = set()
    stack = [start]
    while stack:
        for other in waits_for[stack.pop()]:
            if other not in found:
                found.add(other)
                stack.append(other)
    return found


def knows_plans(tokenizer: Tokenizer) -> bool:
    """Whether a marker of the plan protocol is one token: then the model was trained to write plans."""
    return len(tokenizer.encode(END, add_special_tokens=False)) == 1
