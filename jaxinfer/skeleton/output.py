"""Outputs of Skeleton-of-Thought: events while text lands, and the whole answer by its points."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxinfer.skeleton.plan import Skeleton


@dataclass(frozen=True)
class SkeletonEvent:
    """New text of one point or of the skeleton."""

    point: int | None  # id of the point that it belongs to; None: the skeleton
    text: str  # new since the previous event of the same point
    num_tokens: int  # new since then
    step: int  # of the engine, counted from the start of the answer
    finished: bool
    finish_reason: str | None = None  # "stop" or "length", with the last event of the point


@dataclass
class PointOutput:
    """One point of an answer."""

    id: int
    title: str
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass
class SkeletonMetrics:
    """Cost of an answer: engine steps, tokens and seconds, for the skeleton and for its points."""

    skeleton_steps: int = 0
    skeleton_tokens: int = 0
    skeleton_seconds: float = 0.0
    point_steps: int = 0
    point_tokens: int = 0
    point_seconds: float = 0.0


@dataclass
class SkeletonOutput:
    """An answer with its points; a direct answer has none."""

    question: str
    written: str  # the skeleton's text, which can be given as `skeleton` to expand it again
    skeleton: Skeleton
    points: list[PointOutput]
    text: str
    metrics: SkeletonMetrics = field(repr=False)
