"""Callers of one `LLM`: what happens to one of them takes nothing from the others."""

from __future__ import annotations

import pytest

from jaxinfer import SamplingParams
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.launcher import Launcher
from jaxinfer.frontend.detokenizer import IncrementalDetokenizer
from jaxinfer.scheduling.pace import Pace
from tests.tiny_checkpoints import assert_idle, story_ids, story_llm, story_text

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with story_llm(tmp_path_factory) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm, monkeypatch):
    # A launch of a stream has one round, so that something is left to interrupt.
    monkeypatch.setattr(Pace, "within", lambda self, kind, seconds: 1)
    yield
    assert_idle(llm)
    assert not llm.client._processor._followers


def interrupted_once(function, when=lambda: True):
    pending = [True]

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        if pending and when():
            pending.pop()
            raise KeyboardInterrupt
        return result

    return wrapped


def text_of(deltas) -> str:
    return "".join(delta.outputs[0].text for delta in deltas)


def test_a_stream_ends_although_its_last_step_was_interrupted_in_another_stream(llm, monkeypatch):
    """The outputs of a step that another caller drives are there for their own reader."""
    one, other = llm.stream("Say c", SamplingParams(temperature=0.0, max_tokens=40)), llm.stream("Say a", GREEDY)
    texts = [next(other).outputs[0].text]
    next(one)

    def other_has_ended() -> bool:
        return not any(request.request_id == other_id for request in llm.core.scheduler.requests.values())

    other_id = max(llm.core.scheduler.requests, key=int)
    monkeypatch.setattr(EngineCore, "step", interrupted_once(EngineCore.step, other_has_ended))
    with pytest.raises(KeyboardInterrupt):
        for _ in one:
            pass
    assert "".join(texts) + text_of(other) == story_text("a")


def test_an_interrupted_generate_leaves_an_engine_that_answers_rightly(llm, monkeypatch):
    llm.reset_prefix_cache()  # prompts that are cached need no step
    monkeypatch.setattr(Launcher, "_launch_step", interrupted_once(Launcher._launch_step))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Say a", "Say b"], GREEDY, use_tqdm=False)
    outputs = llm.generate(["Say a", "Say b"], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [story_text("a"), story_text("b")]


def test_a_loop_that_an_engine_has_forgotten_ends_with_an_error(llm):
    stream = llm.stream("Say a", GREEDY)
    next(stream)
    (request,) = llm.core.scheduler.requests.values()
    llm.core.landing_listeners.remove(llm.client._processor.process)
    try:
        llm.core.abort(request.request_id)
        with pytest.raises(RuntimeError, match="nothing left to do, and has no end of"):
            list(stream)
    finally:
        llm.core.landing_listeners.append(llm.client._processor.process)
        llm.client._processor.forget([request.request_id])


def test_text_is_made_anew_where_its_making_was_interrupted(llm, monkeypatch):
    append = IncrementalDetokenizer.append
    monkeypatch.setattr(IncrementalDetokenizer, "append", interrupted_once(append))
    stream = llm.stream("Say b", GREEDY)
    other = llm.stream("Say a", GREEDY)
    with pytest.raises(KeyboardInterrupt):
        next(other)
    assert text_of(stream) == story_text("b")


def test_a_refused_stream_is_refused_at_the_call(llm):
    with pytest.raises(ValueError, match="prompt 0 has"):
        llm.stream(list(range(1, 60)) * 20, GREEDY)


def test_what_was_queued_on_the_core_can_be_aborted_by_the_llm(llm):
    from tests.builders import make_request

    llm.core.add_request(make_request("mine", list(b"Say c"), max_tokens=30))
    llm.core.step()
    assert llm.abort("mine") and not llm.abort("mine")
    llm.core.step()


def test_all_requests_can_be_aborted(llm):
    first = llm.add_request("Say c", SamplingParams(temperature=0.0, max_tokens=50))
    second = llm.add_request("Say a", GREEDY, stream=True)
    llm.step()
    assert llm.abort_all() == 2 and llm.abort_all() == 0
    ended = {output.request_id: output.outputs[0].finish_reason for output in llm.step() if output.finished}
    assert ended == {first: "abort", second: "abort"}


def test_what_a_slow_reader_has_not_taken_is_merged(llm):
    slow, fast = llm.stream("Say a", GREEDY), llm.stream("Say c", SamplingParams(temperature=0.0, max_tokens=20))
    first = next(slow)
    assert len(list(fast)) == 20
    (rest,) = list(slow)
    tokens = [*first.outputs[0].token_ids, *rest.outputs[0].token_ids]
    assert tokens == story_ids("a") and first.outputs[0].text + rest.outputs[0].text == story_text("a")
