"""Made-up names and things: the answer is right for them, and nothing held out is among them."""

import itertools
import json
import random

import pytest

from training.corpus import KINDS, held_out_cases
from training.inventory import combinations, is_held_out
from training.scores import score
from training.settled import SETTLED_MIXTURE, settled
from training.varied import COPYING, invented, varied, varied_stream

OF_TASKS = ("plan", "expansion", "expansion_after_plan", "guide")


@pytest.mark.parametrize("kind", OF_TASKS)
def test_answers_about_made_up_things_pass_the_checks_of_their_kind(kind):
    rng = random.Random(3)
    before = held_out_cases(kind, 60)
    samples = [settled(varied(sample, rng)) for sample in before]
    for old, new in zip(before, samples, strict=True):
        assert new.task.thing.name != old.task.thing.name
        # In one conversation the task is named in the first request.
        assert new.task.phrase in new.messages[-4 if kind == "expansion_after_plan" else -2]["content"]
    for each in score(kind, samples, [sample.answer for sample in samples]):
        assert each.right == each.cases == 60, each.check


@pytest.mark.parametrize("kind", sorted(COPYING))
def test_answers_that_copy_have_the_new_names(kind):
    rng = random.Random(4)
    changed = 0
    for sample in held_out_cases(kind, 80):
        new = varied(sample, rng)
        changed += new.answer != sample.answer
        copied = [new.answer]
        if kind == "to_json":
            copied = [str(value) for key, value in json.loads(new.answer).items() if key != "kind"]
        prompt = "\n".join(message["content"] for message in new.prompt)
        assert all(words in prompt for words in copied)
    assert changed > 10


def test_the_same_name_is_renamed_alike_everywhere():
    sample = KINDS["reading"](random.Random(8), False)
    new = varied(sample, random.Random(0))
    assert new.answer in new.prompt[-1]["content"]
    assert new != sample


def test_articles_follow_what_is_made_up():
    for seed in range(200):
        new = varied(held_out_cases("plan", 1, seed)[0], random.Random(seed))
        text = f" {new.prompt[-1]['content']} "
        for article, first in ((" a ", "aeiou"), (" an ", "bcdfghjklmnpqrstvwxyz")):
            after = text.split(article)[1:]
            assert not any(rest[0].lower() in first and not rest.startswith("u") for rest in after), text


def test_kinds_without_names_or_tasks_stay_as_they_are():
    rng = random.Random(5)
    for kind in ("arithmetic", "world", "small_talk", "object"):
        sample = KINDS[kind](rng, False)
        assert varied(sample, rng) == sample


def test_invented_names_are_many_and_none_is_held_out():
    rng = random.Random(6)
    names = {invented(rng) for _ in range(3000)}
    assert len(names) > 2700
    assert not any(is_held_out(f"name:person:{name}") or is_held_out(f"name:place:{name}") for name in names)


def test_no_thing_of_a_held_out_combination_is_trained_on():
    held_out = {(action.name, thing.name) for action, thing in combinations(True)}
    tasks = [sample.task for sample in itertools.islice(varied_stream(1), 1500) if sample.task is not None]
    assert tasks
    sorts = 0
    for task in tasks:
        for action, name in held_out:
            assert action != task.action.name or not (task.thing.name == name or task.thing.name.endswith(f" {name}"))
        sorts += task.thing.name not in {thing.name for _, thing in combinations(False)}
    assert 0.4 < sorts / len(tasks) < 0.6


def test_the_stream_is_the_same_for_one_seed():
    first, second = (list(itertools.islice(varied_stream(2), 50)) for _ in range(2))
    assert first == second
    assert {sample.kind for sample in itertools.islice(varied_stream(2), 1500)} == set(SETTLED_MIXTURE)
