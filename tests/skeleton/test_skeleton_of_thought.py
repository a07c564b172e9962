"""Answers by a plan whose points are written at the same time: waves, events, protocols, what is refused."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.skeleton.answer import MOST_SKELETON_TOKENS, SkeletonEvent, SkeletonOfThought, SkeletonOutput
from jaxinfer.skeleton.plan import parse_skeleton, point_text

LIMITS = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_tokens": 2048}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
QUESTION = "Make a plan with five points: repair a bicycle."
WITH_WAVES = (
    "[PLAN]\n1.<25><None>[-]Find the fault\n2.<30><None>[1]Collect the tools\n3.<25><None>[-]Take off the wheels\n"
    "4.<25><None>[2,3]Clean the inside\n[END]"
)
OUTLINE = "1. Find the fault\n2. Collect the tools\n3. Clean the inside"
LINE = re.compile(r"(\d+)\.<[1-9]\d{0,3}><None>\[(-|\d+(,\d+)*)\]\S.*")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**LIMITS)


@pytest.fixture(scope="module")
def answer(llm) -> SkeletonOutput:
    return llm.skeleton_of_thought(QUESTION, GREEDY)


def test_a_question_is_answered_point_by_point_in_the_plans_order(answer):
    assert [point.id for point in answer.points] == [1, 2, 3, 4, 5]
    assert [point.title for point in answer.points] == [point.title for point in answer.skeleton.points]
    lines = [f"{point.id}. {point.title}: {point.text}" for point in answer.points]
    assert answer.text == "\n".join(lines)
    assert all(point.text and "[" not in point.text for point in answer.points)
    assert {point.finish_reason for point in answer.points} == {"stop"}


def test_the_plan_that_was_written_can_be_expanded_again(llm, answer):
    again = llm.skeleton_of_thought(QUESTION, GREEDY, skeleton=answer.written)
    assert (again.skeleton, again.points, again.text) == (answer.skeleton, answer.points, answer.text)
    assert again.metrics.skeleton_tokens == again.metrics.skeleton_steps == 0


def test_steps_and_tokens_are_counted_apart_for_the_skeleton_and_its_points(llm, answer):
    metrics, lengths = answer.metrics, [len(point.token_ids) for point in answer.points]
    written = llm.get_tokenizer().encode(answer.written, add_special_tokens=False)
    assert metrics.skeleton_tokens in (len(written), len(written) + 1)  # the end of the turn is no text
    # A prompt that fits into a step brings the first token with it.
    assert metrics.skeleton_tokens <= metrics.skeleton_steps <= metrics.skeleton_tokens + 2
    assert metrics.point_tokens == sum(lengths)
    assert max(lengths) <= metrics.point_steps < sum(lengths) / 2
    assert metrics.skeleton_seconds > 0 and metrics.point_seconds > 0


def test_a_point_waits_for_those_that_it_depends_on_and_is_shown_them(llm):
    events: list[SkeletonEvent] = []
    output = llm.skeleton_of_thought(QUESTION, GREEDY, skeleton=WITH_WAVES, on_event=events.append)
    assert [[point.id for point in wave] for wave in output.skeleton.waves()] == [[1, 3], [2], [4]]
    first = {point: min(event.step for event in events if event.point == point) for point in (1, 2, 3, 4)}
    last = {point: max(event.step for event in events if event.point == point) for point in (1, 2, 3, 4)}
    assert max(first[1], first[3]) < min(last[1], last[3])
    assert max(last[1], last[3]) < first[2] and last[2] < first[4]
    method = SkeletonOfThought(llm.client)
    texts = {point.id: point.text for point in output.points}
    for point, number in ((output.skeleton.points[1], 1), (output.skeleton.points[3], 3)):
        prompt = method.prompts.ask_point(QUESTION, WITH_WAVES, output.skeleton, point, texts)
        assert all(f"Point {other}: {texts[other]}" in prompt[-1]["content"] for other in point.dependencies)
        (alone,) = llm.chat(prompt, method.params_of_points(GREEDY), use_tqdm=False)
        assert alone.outputs[0].token_ids == output.points[number].token_ids


def test_events_add_up_to_what_comes_without_them(llm, answer):
    events: list[SkeletonEvent] = []
    output = llm.skeleton_of_thought(QUESTION, GREEDY, on_event=events.append)
    assert (output.written, output.text) == (answer.written, answer.text)
    texts, tokens, ends = defaultdict(str), defaultdict(int), defaultdict(list)
    for event in events:
        texts[event.point] += event.text
        tokens[event.point] += event.num_tokens
        ends[event.point].append(event.finished)
    assert texts[None] == output.written
    assert {point.id: point.text for point in output.points} == {
        number: point_text(text) for number, text in texts.items() if number is not None
    }
    assert tokens == {None: output.metrics.skeleton_tokens} | {p.id: len(p.token_ids) for p in output.points}
    assert all(flags == [False] * (len(flags) - 1) + [True] for flags in ends.values())
    steps = [event.step for event in events]
    assert steps == sorted(steps) and steps[0] >= 1
    assert steps[-1] <= output.metrics.skeleton_steps + output.metrics.point_steps


def test_a_question_that_needs_no_plan_is_answered_directly(llm):
    events: list[SkeletonEvent] = []
    output = llm.skeleton_of_thought("Wick, who is the doctor?", GREEDY, on_event=events.append)
    assert output.skeleton.is_direct and output.points == []
    assert output.written == f"[DIRECT]\n{output.text}\n[END]" and output.text
    assert output.metrics.point_steps == output.metrics.point_tokens == 0
    assert {event.point for event in events} == {None}


def test_an_outline_is_expanded_for_models_that_know_no_protocol(llm):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    output = llm.skeleton_of_thought(QUESTION, params, protocol="outline", skeleton=OUTLINE)
    assert [point.title for point in output.points] == ["Find the fault", "Collect the tools", "Clean the inside"]
    assert output.text.startswith("1. Find the fault: ") and output.text.count("\n") >= 2
    assert all(1 <= len(point.token_ids) <= 12 for point in output.points)


@pytest.mark.parametrize("protocol", ["plan", "outline"])
def test_a_skeleton_without_points_is_a_direct_answer(protocol, llm):
    output = llm.skeleton_of_thought(QUESTION, GREEDY, protocol=protocol, skeleton="Ask somebody who knows.")
    assert (output.text, output.points) == ("Ask somebody who knows.", [])


def test_a_seed_gives_the_same_answer_again_and_another_one_another(llm):
    def text(seed: int) -> str:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=32)
        return llm.skeleton_of_thought(QUESTION, params).text

    assert text(3) == text(3) != text(4)


def test_a_hot_model_is_held_to_the_grammar(llm):
    kinds = set()
    for seed in range(5):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=16)
        output = llm.skeleton_of_thought(QUESTION, params)
        tag, *lines = output.written.split("\n")
        kinds.add(tag)
        cut = output.metrics.skeleton_tokens == MOST_SKELETON_TOKENS
        assert cut or output.written.endswith("[END]")
        assert output.skeleton == parse_skeleton(output.written, 16)
        if tag == "[PLAN]":
            matches = [LINE.fullmatch(line) for line in lines[:-1]]
            assert [match and match[1] for match in matches] == [str(number + 1) for number in range(len(lines) - 1)]
            assert len(output.points) in ((len(lines) - 1, len(lines)) if cut else (len(lines) - 1,))
        else:
            assert tag == "[DIRECT]" and output.skeleton.is_direct
    assert "[PLAN]" in kinds


def test_several_answers_at_once_are_refused(llm):
    with pytest.raises(ValueError, match="n=2: a skeleton is expanded once"):
        llm.skeleton_of_thought(QUESTION, SamplingParams(n=2))


def test_an_unknown_protocol_is_refused(llm):
    with pytest.raises(ValueError, match="protocol must be one of auto, plan, outline, got 'magic'"):
        llm.skeleton_of_thought(QUESTION, protocol="magic")


def test_an_unknown_mode_is_refused_and_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="branch_mode must be one of in_one_sequence, batching, got 'tree'"):
        llm.skeleton_of_thought(QUESTION, GREEDY, skeleton=WITH_WAVES, branch_mode="tree")
    assert not llm.has_unfinished_requests()


def test_an_engine_without_a_tokenizer_is_refused():
    llm = LLM(**LIMITS, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.skeleton_of_thought(QUESTION)


def test_an_error_of_whoever_is_told_ends_what_runs(llm):
    def fail(event: SkeletonEvent) -> None:
        if event.point is not None:
            raise KeyError("stop here")

    with pytest.raises(KeyError, match="stop here"):
        llm.skeleton_of_thought(QUESTION, GREEDY, on_event=fail)
    assert not llm.has_unfinished_requests()
    assert llm.core.scheduler.kv.allocator.num_held == 0
