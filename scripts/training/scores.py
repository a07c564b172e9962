"""Scoring of answers to held-out cases: one strict, mechanical check per kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from training.chat import tagged, untagged
from training.corpus import Sample
from training.plans import (
    find_point,
    mentions,
    names_a_number,
    on_topic,
    parse_skeleton,
    skeleton_belongs,
    split_sentences,
)
from training.tool_format import HERMES, calls_in

Check = Callable[[Sample, str], bool]


@dataclass(frozen=True)
class Score:
    """How many of `cases` answers passed; `threshold` is the required share, None where the figure is only reported."""

    kind: str
    check: str
    right: int
    cases: int
    threshold: float | None = None

    @property
    def share(self) -> float:
        return self.right / self.cases

    @property
    def passed(self) -> bool:
        return self.threshold is None or self.share >= self.threshold


def _exact(sample: Sample, answer: str) -> bool:
    return answer == sample.answer


def _well_formed(sample: Sample, answer: str) -> bool:
    return parse_skeleton(answer) is not None


def _of_the_task(sample: Sample, answer: str) -> bool:
    return sample.task is not None and skeleton_belongs(answer, sample.task)


def _right_length(sample: Sample, answer: str) -> bool:
    """Whether a plan has as many points as the request names; requests that name no number count as right."""
    titles = parse_skeleton(answer)
    request, skeleton = sample.prompt[-1]["content"], sample.skeleton
    if titles is None or skeleton is None:
        return False
    return not names_a_number(request) or len(titles) == len(skeleton.points)


def _on_topic(sample: Sample, answer: str) -> bool:
    task, skeleton = sample.task, sample.skeleton
    return task is not None and skeleton is not None and on_topic(answer, task, skeleton.points[sample.point])


def _asked_sentences(sample: Sample, answer: str) -> bool:
    body = answer.removeprefix("[ANSWER]").removesuffix("[END]")
    skeleton, sentences = sample.skeleton, split_sentences(body)
    return skeleton is not None and sentences is not None and len(sentences) == skeleton.counts[sample.point]


def _guide_on_topic(sample: Sample, answer: str) -> bool:
    """Whether every line is "k. Title: sentences" with a title of the task and sentences about that point."""
    task = sample.task
    if task is None:
        return False
    for number, line in enumerate(answer.split("\n"), start=1):
        head, colon, body = line.partition(": ")
        point = find_point(task, head.removeprefix(f"{number}. "))
        if not colon or not head.startswith(f"{number}. ") or point is None:
            return False
        if not on_topic(f"[ANSWER]{body}[END]", task, point):
            return False
    return True


def _valid_json(sample: Sample, answer: str) -> bool:
    try:
        return isinstance(json.loads(answer), dict)
    except json.JSONDecodeError:
        return False


def _right_record(sample: Sample, answer: str) -> bool:
    return _valid_json(sample, answer) and json.loads(answer) == json.loads(sample.answer)


def _direct(sample: Sample, answer: str) -> bool:
    body = untagged(answer)
    return answer == tagged(body) and bool(body.strip()) and "[" not in body


def _right_calls(sample: Sample, answer: str) -> bool:
    """Whether an answer is the right calls, by names and arguments, and nothing else."""
    assert sample.talk is not None
    return calls_in(sample.talk.tools, answer) == calls_in(sample.talk.tools, sample.answer)


def _no_call(sample: Sample, answer: str) -> bool:
    return HERMES.open not in answer


def _uses_result(sample: Sample, answer: str) -> bool:
    """Whether an answer has all that the result tells, and calls nothing."""
    assert sample.talk is not None
    return _no_call(sample, answer) and bool(answer) and all(mentions(answer, used) for used in sample.talk.used)


# Kind of case, what is checked (as the model card says it), the check, the required share.
CHECKS: tuple[tuple[str, str, Check, float | None], ...] = (
    ("plan", "skeleton well-formed", _well_formed, 0.95),
    ("plan", "well-formed, different titles, all of the task", _of_the_task, None),
    ("plan", "as many points as asked", _right_length, None),
    ("expansion", "on topic, right tags, two or three sentences", _on_topic, 0.90),
    ("expansion", "as many sentences as asked", _asked_sentences, None),
    ("expansion_after_plan", "on topic, in the plan's conversation", _on_topic, 0.90),
    ("guide", "every point on topic", _guide_on_topic, None),
    ("reading", "answer exact", _exact, 0.90),
    ("repetition", "answer exact", _exact, None),
    ("from_json", "value exact", _exact, None),
    ("to_json", "valid JSON", _valid_json, None),
    ("to_json", "record exact", _right_record, None),
    ("direct", "tags right", _direct, None),
    ("world", "answer exact, new wording", _exact, None),
    ("arithmetic", "answer exact", _exact, None),
    ("tool_call", "one call, name and arguments exact", _right_calls, 0.80),
    ("tool_bare", "one call without arguments, exact", _right_calls, None),
    ("tool_calls", "two calls, names and arguments exact", _right_calls, None),
    ("tool_none", "no call where none is needed", _no_call, 0.95),
    ("tool_none", "answer exact", _exact, None),
    ("tool_result", "answer uses the result", _uses_result, 0.90),
    ("tool_result", "answer exact", _exact, None),
    ("tool_error", "answer says the error", _uses_result, None),
    ("tool_chain", "second call, name and arguments exact", _right_calls, None),
)


def score(kind: str, samples: list[Sample], answers: list[str]) -> list[Score]:
    """All checks of one kind. Raises ValueError when an answer is missing."""
    if len(samples) != len(answers):
        raise ValueError(f"{len(samples)} cases of kind {kind!r} but {len(answers)} answers")
    return [
        Score(kind, name, sum(check(s, a) for s, a in zip(samples, answers, strict=True)), len(samples), threshold)
        for each, name, check, threshold in CHECKS
        if each == kind
    ]
