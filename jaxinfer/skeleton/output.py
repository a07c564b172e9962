"""What Skeleton-of-Thought gives: text as it comes, and the whole answer by its points."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxinfer.skeleton.plan import Skeleton


@dataclass(frozen=True)
class SkeletonEvent:
    """Text as it comes."""

    point: int | None  # the id of the point that it belongs to; None: the skeleton
    text: str  # new since the last event of the same point
    num_tokens: int  # new, too
    step: int  # of the engine, counted from the beginning of the answer
    finished: bool


@dataclass
class PointOutput:
    """A point of the answer."""

    id: int
    title: str
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass
class SkeletonMetrics:
    """What an answer took: steps of the engine, tokens and seconds, for the skeleton and for its points."""

    skeleton_steps: int = 0
    skeleton_tokens: int = 0
    skeleton_seconds: float = 0.0
    point_steps: int = 0
    point_tokens: int = 0
    point_seconds: float = 0.0


@dataclass
class SkeletonOutput:
    """An answer by its points; a direct one has none."""

    question: str
    written: str  # the skeleton's text, which can be given as `skeleton` to expand it again
    skeleton: Skeleton
    points: list[PointOutput]
    text: str
    metrics: SkeletonMetrics = field(repr=False)
