"""Deterministic answers of the corpus: the first choice instead of a random one, so that much is certain at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from training.chat import untagged
from training.corpus import Sample, stream
from training.inventory import exchanges
from training.plans import Skeleton, names_a_number

USUAL_POINTS = 4
"""Points of a plan whose prompt asks for no number."""
FEW = 2
"""Sentences of a point whose prompt asks for no number."""
SETTLED_MIXTURE: dict[str, float] = {
    "plan": 16,
    "expansion": 13,
    "expansion_after_plan": 7,
    "guide": 14,
    "direct": 6,
    "dialogue": 1,
    "world": 9,
    "small_talk": 5,
    "object": 5,
    "reading": 13,
    "reading_series": 3,
    "repetition": 8,
    "to_json": 10,
    "from_json": 5,
    "arithmetic": 2,
}
"""Samples of each kind: more of those with long answers than in the corpus, fewer of those with long prompts."""


class FirstChoice(random.Random):
    """Where there is a choice, the first."""

    def choice(self, seq: Sequence[Any]) -> Any:
        return seq[0]


def settled_stream(seed: int, held_out: bool = False) -> Iterator[Sample]:
    """Endless `settled` samples of all kinds in the proportions of `SETTLED_MIXTURE`."""
    return map(settled, stream(seed, held_out, SETTLED_MIXTURE))


def settled(sample: Sample) -> Sample:
    """A sample in which nothing is chosen. A plan, point or guide has as many points as were asked for, the first ones
    of the task, each with the first of its sentences; small talk, also within other kinds, has the first answer."""
    if not sample.messages:
        return sample
    skeleton = sample.skeleton
    if skeleton is None:
        return _with_answer(sample, _chosen_small_talk(sample.answer))
    first = FirstChoice()
    if sample.point >= 0:  # its number of sentences was asked for
        answer = skeleton.expansion(sample.point, first)
    else:
        is_asked = sample.kind == "guide" or names_a_number(sample.prompt[-1]["content"])
        size = len(skeleton.points) if is_asked else USUAL_POINTS
        skeleton = Skeleton(skeleton.task, skeleton.task.action.points[:size], (FEW,) * size)
        answer = skeleton.guide(first) if sample.kind == "guide" else skeleton.plan()
    return replace(_with_answer(sample, answer), skeleton=skeleton)


def _with_answer(sample: Sample, answer: str) -> Sample:
    return replace(sample, messages=(*sample.messages[:-1], sample.messages[-1] | {"content": answer}))


def _chosen_small_talk(answer: str) -> str:
    """The first of the answers where it is another one of small talk, with the tags that it has; else the same."""
    inner = untagged(answer)
    return answer.replace(inner, _first_answers().get(inner, inner))


@cache
def _first_answers() -> dict[str, str]:
    return {answer: talk.answers[0] for talk in exchanges("smalltalk.txt") for answer in talk.answers[1:]}
