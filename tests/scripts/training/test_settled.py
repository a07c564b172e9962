"""Deterministic answers: a prompt has exactly one, and it passes the checks of its kind."""

import itertools
import json

import pytest

from training.corpus import KINDS, held_out_cases, stream
from training.inventory import exchanges
from training.plans import names_a_number, parse_skeleton
from training.scores import score
from training.settled import FEW, SETTLED_MIXTURE, USUAL_POINTS, settled, settled_stream

CHOSEN = ("plan", "expansion", "expansion_after_plan", "guide")
TALKING = ("small_talk", "direct", "dialogue", "long_dialogue")  # they may end with small talk


@pytest.mark.parametrize("kind", CHOSEN)
def test_settled_answers_pass_the_checks_of_their_kind(kind):
    samples = [settled(sample) for sample in held_out_cases(kind, 60)]
    for each in score(kind, samples, [sample.answer for sample in samples]):
        assert each.right == each.cases == 60, each.check


@pytest.mark.parametrize("kind", ["plan", "expansion", "guide"])  # prompts of the fourth are hardly ever the same
def test_a_prompt_has_one_answer(kind):
    samples = list(itertools.islice(stream(4, mixture={kind: 1.0}), 6000))
    free, fixed = {}, {}
    for sample in samples:
        key = json.dumps(sample.prompt)
        free.setdefault(key, set()).add(sample.answer)
        fixed.setdefault(key, set()).add(settled(sample).answer)
    assert any(len(answers) > 1 for answers in free.values())
    assert all(len(answers) == 1 for answers in fixed.values())


def test_a_plan_has_the_first_points_and_as_many_as_were_asked_for():
    sizes = {True: set(), False: set()}
    for sample in itertools.islice(settled_stream(1), 300):
        if sample.kind != "plan":
            continue
        task, skeleton = sample.task, sample.skeleton
        assert (
            parse_skeleton(sample.answer) == [task.title(point) for point in task.action.points][: len(skeleton.points)]
        )
        assert set(skeleton.counts) == {FEW}
        sizes[names_a_number(sample.prompt[-1]["content"])].add(len(skeleton.points))
    assert sizes[False] == {USUAL_POINTS}
    assert len(sizes[True]) > 3


def test_prompts_and_other_kinds_stay_as_they_are():
    for sample in itertools.islice(stream(2), 400):
        changed = settled(sample)
        assert changed.prompt == sample.prompt
        if sample.kind not in (*CHOSEN, *TALKING):
            assert changed == sample


@pytest.mark.parametrize("kind", ["small_talk", "direct"])
def test_small_talk_has_the_first_of_its_answers(kind):
    talks = exchanges("smalltalk.txt")
    first = {answer: talk.answers[0] for talk in talks for answer in talk.answers}
    seen = set()
    for sample in itertools.islice(stream(3, mixture={kind: 1.0}), 600):
        tags = ("[DIRECT]\n", "\n[END]") if kind == "direct" else ("", "")
        inner = sample.answer.removeprefix(tags[0]).removesuffix(tags[1])
        changed = settled(sample)
        assert changed.answer == f"{tags[0]}{first.get(inner, inner)}{tags[1]}"
        assert changed.prompt == sample.prompt
        seen.add(inner in first and changed.answer != sample.answer)
    assert seen == {True, False}


def test_samples_have_the_kinds_of_the_mixture():
    kinds = {sample.kind for sample in itertools.islice(settled_stream(0), 2000)}
    assert kinds == set(SETTLED_MIXTURE)
    assert kinds < set(KINDS)
