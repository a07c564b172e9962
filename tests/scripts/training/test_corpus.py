"""The corpus of the embedded checkpoint: deterministic, split by combinations, with sound exercises."""

import itertools
import json
import random

import pytest

from training.chat import _about
from training.corpus import KINDS, MIXTURE, RENAMED_MIXTURE, TOOL_MIXTURE, held_out_cases, stream
from training.inventory import actions, combinations, exchanges, things
from training.language import fix_articles, person, place, with_article
from training.plans import Task, draw_skeleton, draw_task, mentions, split_sentences


def take(count: int, **arguments) -> list:
    return list(itertools.islice(stream(**arguments), count))


def test_the_same_seed_gives_the_same_samples():
    assert take(200, seed=3) == take(200, seed=3)


def test_another_seed_gives_other_samples():
    assert take(50, seed=3) != take(50, seed=4)


@pytest.mark.parametrize(
    "mixture", [MIXTURE, TOOL_MIXTURE, RENAMED_MIXTURE], ids=["from nothing", "with tools", "with other names"]
)
def test_every_kind_of_the_mixture_occurs(mixture):
    assert set(mixture) == {sample.kind for sample in take(3000, seed=0, mixture=mixture)}


def test_every_kind_is_in_the_mixture_with_other_names():
    assert set(RENAMED_MIXTURE) == set(KINDS)


def test_held_out_pairs_and_training_pairs_are_disjoint_and_together_all():
    training = {(action.name, thing.name) for action, thing in combinations(False)}
    held_out = {(action.name, thing.name) for action, thing in combinations(True)}
    assert not training & held_out
    assert training | held_out == {(a.name, t.name) for a in actions() for t in things()[a.kind]}
    assert len(held_out) >= 30


def test_training_never_shows_a_held_out_task():
    held_out = {f"{action.name}:{thing.name}" for action, thing in combinations(True)}
    shown = {f"{s.task.action.name}:{s.task.thing.name}" for s in take(4000, seed=1) if s.task is not None}
    assert len(shown) > 250
    assert not shown & held_out


def test_held_out_cases_are_only_about_held_out_tasks():
    held_out = {f"{action.name}:{thing.name}" for action, thing in combinations(True)}
    cases = held_out_cases("plan", 100)
    assert {f"{case.task.action.name}:{case.task.thing.name}" for case in cases if case.task} <= held_out


@pytest.mark.parametrize("draw", [person, place])
def test_names_of_training_and_held_out_names_are_disjoint(draw):
    rng = random.Random(0)
    training = {draw(rng, False) for _ in range(3000)}
    held_out = {draw(rng, True) for _ in range(3000)}
    assert len(training) > 1500
    assert not training & held_out


@pytest.mark.parametrize("kind", ["reading", "repetition", "to_json", "from_json", "arithmetic", "world", "expansion"])
def test_no_held_out_prompt_occurs_in_training(kind):
    rng = random.Random(5)
    training = {json.dumps(KINDS[kind](rng, False).prompt) for _ in range(3000)}
    assert not training & {json.dumps(case.prompt) for case in held_out_cases(kind, 50)}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"article", "small_talk", "object", "world"}))
def test_there_are_two_hundred_different_held_out_cases(kind):
    cases = held_out_cases(kind, 200)
    assert len({json.dumps(case.prompt) for case in cases}) == 200


def test_a_kind_with_too_few_different_prompts_says_how_many_it_has():
    with pytest.raises(ValueError, match="'article' has only 1 different held-out prompts, 2 were asked for"):
        held_out_cases("article", 2)


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="'poem' is unknown, allowed are plan"):
        held_out_cases("poem", 1)


def test_every_action_has_eight_points_with_different_titles_for_every_object():
    for action in actions():
        for thing in things()[action.kind]:
            assert len({Task(action, thing).title(point) for point in action.points}) == 8


def test_every_opener_names_the_object_and_a_keyword_of_its_point():
    for action, thing in (*combinations(False), *combinations(True)):
        task = Task(action, thing, "Tavi")
        for point in action.points:
            for opener in point.openers:
                text = task.fill(opener)
                assert mentions(text, thing.name), text
                assert any(mentions(text, keyword) for keyword in point.keywords), text


def test_every_template_is_one_complete_sentence():
    for action in actions():
        task = Task(action, things()[action.kind][0], "Tavi")
        for point in action.points:
            for template in (*point.openers, *point.followers):
                assert split_sentences(task.fill(template)) == [task.fill(template)]


def test_a_skeleton_keeps_the_natural_order_of_the_points():
    rng = random.Random(1)
    for _ in range(50):
        task = draw_task(rng, False)
        order = [task.action.points.index(point) for point in draw_skeleton(rng, task).points]
        assert order == sorted(set(order))
        assert 3 <= len(order) <= 8


def test_the_expected_length_tells_two_sentences_from_three():
    for action, thing in combinations(False):
        task = Task(action, thing)
        for point in action.points:
            assert task.expected_tokens(point, 2) <= 30 < 35 <= task.expected_tokens(point, 3)


def test_the_expansion_prompts_of_one_skeleton_share_all_but_their_last_line():
    rng = random.Random(2)
    skeleton = draw_skeleton(rng, draw_task(rng, True), 4)
    heads = {skeleton.expansion_prompt(index).rpartition("\n")[0] for index in range(4)}
    assert len(heads) == 1


def test_the_answer_of_a_reading_stands_in_its_text():
    for case in held_out_cases("reading", 100):
        assert case.answer in case.prompt[-1]["content"]


def test_a_reading_has_only_one_answer_to_its_question():
    for case in held_out_cases("reading", 200):
        text = case.prompt[-1]["content"].split("Text: ")[1].split("\nQuestion:")[0]
        assert text.count(case.answer) == 1


def test_every_answer_of_a_series_stands_in_the_text_of_its_first_prompt():
    for case in held_out_cases("reading_series", 50):
        answers = [message["content"] for message in case.messages if message["role"] == "assistant"]
        assert 2 <= len(set(answers)) == len(answers) <= 5
        assert all(answer in case.messages[0]["content"] for answer in answers)


def test_sums_are_right():
    for case in held_out_cases("arithmetic", 200):
        left, right = case.answer.split(", so ")[0].split(" = ")
        assert eval(left) == int(right)


def test_a_record_says_what_its_sentence_says():
    for case in held_out_cases("to_json", 50):
        record = json.loads(case.answer)
        assert all(str(value) in case.prompt[-1]["content"] for field, value in record.items() if field != "kind")


def test_every_class_of_objects_has_questions_about_it():
    for kind, members in things().items():
        assert all(len(_about(thing)) >= 2 for thing in members), kind


def test_every_fact_of_the_world_has_one_answer():
    assert all(len(fact.answers) == 1 and len(fact.asks) >= 3 for fact in exchanges("world.txt"))


def test_articles_follow_the_sound_of_the_noun():
    assert with_article("umbrella") == "an umbrella"
    assert fix_articles("A umbrella is a used thing for a old kite") == "An umbrella is a used thing for an old kite"
