"""The mechanical checks of plans and expansions: good ones pass, planted bad ones do not."""

import random

import pytest

from training.corpus import held_out_cases
from training.inventory import things
from training.plans import Task, action_named, draw_skeleton, on_topic, parse_skeleton, skeleton_belongs
from training.scores import CHECKS, score

BICYCLE = Task(action_named("repair"), next(thing for thing in things()["thing"] if thing.name == "bicycle"))
KITE = Task(action_named("repair"), next(thing for thing in things()["thing"] if thing.name == "kite"))
FAULT, TOOLS = BICYCLE.action.points[:2]
GOOD = "[PLAN]\n1.<40><None>[-]Find the fault\n2.<25><None>[-]Collect the tools\n3.<20><None>[-]Test the result\n[END]"
EXPANSION = "[ANSWER]Look at the bicycle in good light and search for the fault. Turn it slowly.[END]"


def test_a_well_formed_skeleton_gives_its_titles():
    assert parse_skeleton(GOOD) == ["Find the fault", "Collect the tools", "Test the result"]
    assert skeleton_belongs(GOOD, BICYCLE)


@pytest.mark.parametrize(
    "old, new",
    [
        ("[PLAN]\n", ""),
        ("[PLAN]\n", "[PLAN] "),
        ("\n[END]", ""),
        ("\n[END]", "[END]"),
        ("[END]", "[END] and more"),
        ("2.<25>", "3.<25>"),
        ("2.<25>", "2.<0>"),
        ("2.<25>", "2.<some>"),
        ("2.<25>", "2.25"),
        ("<None>", "<Search>"),
        ("[-]", "[1]"),
        ("[-]Find", "[-] Find"),
        ("Find the fault", ""),
        ("Find the fault", "Find the fault "),
        ("\n3.<20><None>[-]Test the result", ""),
        ("[PLAN]", "[DIRECT]"),
    ],
)
def test_a_skeleton_with_one_thing_wrong_is_rejected(old, new):
    assert old in GOOD
    assert parse_skeleton(GOOD.replace(old, new, 1)) is None


def test_nine_points_are_too_many():
    lines = [f"{number}.<20><None>[-]Title {number}" for number in range(1, 10)]
    assert parse_skeleton("\n".join(["[PLAN]", *lines[:8], "[END]"])) is not None
    assert parse_skeleton("\n".join(["[PLAN]", *lines, "[END]"])) is None


def test_a_title_of_another_task_does_not_belong():
    assert not skeleton_belongs(GOOD.replace("Collect the tools", "Taste and wait"), BICYCLE)
    assert not skeleton_belongs(GOOD.replace("Collect the tools", "Take off the frame"), BICYCLE)


def test_a_title_twice_does_not_count():
    assert not skeleton_belongs(GOOD.replace("Collect the tools", "Find the fault"), BICYCLE)


def test_an_expansion_about_its_task_and_point_is_on_topic():
    assert on_topic(EXPANSION, BICYCLE, FAULT)


def test_an_expansion_of_another_task_is_not_on_topic():
    assert not on_topic(EXPANSION, KITE, FAULT)


def test_an_expansion_of_another_point_is_not_on_topic():
    assert not on_topic(EXPANSION, BICYCLE, TOOLS)


@pytest.mark.parametrize(
    "text",
    [
        EXPANSION.removeprefix("[ANSWER]"),
        EXPANSION.removesuffix("[END]"),
        EXPANSION.replace("[ANSWER]", "[DIRECT]"),
        EXPANSION.replace(" Turn it slowly.", ""),
        EXPANSION.replace("slowly.", "slowly"),
        EXPANSION.replace("Turn", "turn"),
        EXPANSION.replace("slowly.", "slowly. Wait. Go on."),
        "[ANSWER][END]",
    ],
)
def test_an_expansion_without_tags_or_with_other_than_two_or_three_sentences_is_rejected(text):
    assert text != EXPANSION
    assert not on_topic(text, BICYCLE, FAULT)


def test_every_plan_that_the_corpus_writes_passes_its_own_check():
    rng = random.Random(4)
    skeleton = draw_skeleton(rng, BICYCLE, 8)
    assert skeleton_belongs(skeleton.plan(), BICYCLE)
    assert all(on_topic(skeleton.expansion(i, rng), BICYCLE, point) for i, point in enumerate(skeleton.points))


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, *_ in CHECKS))
def test_the_expected_answers_score_full_marks_and_foreign_ones_do_not(kind):
    samples = held_out_cases(kind, 40)
    answers = [sample.answer for sample in samples]
    assert all(each.share == 1.0 for each in score(kind, samples, answers))
    assert any(each.share < 0.5 for each in score(kind, samples, ["The market is on Saturday."] * 40))


def test_a_score_below_its_threshold_has_not_passed():
    samples = held_out_cases("reading", 10)
    answers = [sample.answer for sample in samples]
    assert score("reading", samples, answers)[0].passed
    assert not score("reading", samples, ["", "", *answers[2:]])[0].passed


def test_a_missing_answer_is_an_error():
    with pytest.raises(ValueError, match="2 cases of kind 'plan' but 1 answers"):
        score("plan", held_out_cases("plan", 2), [""])
