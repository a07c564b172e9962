"""What drives a workload: every request runs to its end, arrivals and concurrency are kept, counts are exact."""

import time

import pytest

from jaxinfer import SamplingParams
from jaxinfer.bench.driver import run_workload
from jaxinfer.bench.measurement import recording
from jaxinfer.bench.workload import WorkItem
from tests.tiny_checkpoints import story_ids, story_llm


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with story_llm(tmp_path_factory) as llm:
        yield llm


def work(*sizes):
    """Prompts that story `c` continues for ever, with the numbers of tokens to generate; and their parameters."""
    items = [WorkItem({"prompt_token_ids": list(b"Say c")}, size) for size in sizes]
    return items, [SamplingParams(temperature=0.0, max_tokens=size) for size in sizes]


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by a millisecond at each look, and by what is slept."""

    class Clock:
        now = 0.0
        slept = 0.0

        def perf_counter(self):
            self.now += 0.001
            return self.now

        def sleep(self, seconds):
            self.slept += seconds
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


@pytest.fixture
def sizes_seen(llm, monkeypatch):
    """How many requests were unfinished at each step."""
    seen = []
    step = llm.core.step

    def counting_step():
        seen.append(len(llm.core.scheduler.requests))
        return step()

    monkeypatch.setattr(llm.core, "step", counting_step)
    return seen


def test_outputs_stand_in_the_order_of_the_requests(llm):
    items, params = work(5, 1, 3)
    _, outputs = run_workload(llm, items, params)
    assert [output.outputs[0].token_ids for output in outputs] == [story_ids("c", size) for size in (5, 1, 3)]


def test_tokens_requests_and_latencies_are_counted(llm):
    items, params = work(5, 1, 3)
    measured, _ = run_workload(llm, items, params)
    assert (measured.num_requests, measured.prompt_tokens, measured.output_tokens) == (3, 15, 9)
    assert measured.steps >= 5 and measured.launches >= 1 and 1 <= measured.mean_batch <= 2
    assert measured.time_to_first_token is not None and measured.inter_token_latency is not None
    assert 0 < measured.time_to_first_token.mean <= measured.seconds


def test_a_run_counts_nothing_of_the_run_before(llm):
    items, params = work(4, 4)
    first, _ = run_workload(llm, items, params)
    second, _ = run_workload(llm, items, params)
    assert (second.steps, second.launches, second.mean_batch) == (first.steps, first.launches, first.mean_batch)


def test_without_a_limit_all_requests_are_there_from_the_start(llm, sizes_seen):
    run_workload(llm, *work(4, 4, 4, 4))
    assert sizes_seen[0] == 4


def test_concurrency_limits_the_unfinished_requests(llm, sizes_seen):
    run_workload(llm, *work(4, 4, 4, 4), concurrency=2)
    assert max(sizes_seen) == 2


def test_requests_come_when_they_arrive(llm, clock, sizes_seen):
    run_workload(llm, *work(4, 4), arrivals=[0.0, 1000.0])
    assert max(sizes_seen) == 1
    assert clock.slept > 900


def test_the_time_to_first_token_counts_from_the_arrival_even_if_the_engine_was_busy(llm, clock):
    _, outputs = run_workload(llm, *work(4, 4), arrivals=[5.0, 5.0])
    arrived = [output.metrics.arrival_time for output in outputs if output.metrics]
    assert arrived[0] == arrived[1]
    assert arrived[0] == pytest.approx(5.0, abs=0.1)


def test_arrivals_must_be_one_for_each_request(llm):
    with pytest.raises(ValueError, match="1 arrivals for 2 requests"):
        run_workload(llm, *work(4, 4), arrivals=[0.0])


def test_a_concurrency_below_one_is_refused(llm):
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        run_workload(llm, *work(4), concurrency=0)


def test_a_request_that_fails_fails_the_measurement(llm, monkeypatch):
    def fail(*args, **kwargs):
        raise UnicodeError("no text today")

    monkeypatch.setattr(llm.tokenizer, "decode_after", fail)
    with pytest.raises(RuntimeError, match="1 of 1 requests failed, the first with: UnicodeError: no text today"):
        run_workload(llm, *work(2))


def test_the_engine_has_its_own_histograms_back_after_a_recording(llm):
    metrics = llm.core.metrics
    own = metrics.time_to_first_token_seconds
    with recording(llm) as recorder:
        assert metrics.time_to_first_token_seconds is recorder.time_to_first_token
    assert metrics.time_to_first_token_seconds is own


# The engine's methods that this rests on


def test_steps_return_the_whole_output_of_a_queued_request_when_it_is_finished(llm):
    request_id = llm.add_request("Say a", SamplingParams(temperature=0.0))
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    (output,) = outputs
    assert output.request_id == request_id and output.finished
    assert output.outputs[0].text == "The quick brown fox jumps over."


def test_steps_return_what_is_new_of_a_queued_stream(llm):
    llm.add_request("Say a", SamplingParams(temperature=0.0), stream=True)
    texts = []
    while llm.has_unfinished_requests():
        texts += [output.outputs[0].text for output in llm.step()]
    assert len(texts) > 2 and "".join(texts) == "The quick brown fox jumps over."


def test_an_aborted_request_s_output_comes_with_the_next_step(llm):
    request_id = llm.add_request("Say c", SamplingParams(temperature=0.0, max_tokens=50))
    llm.step()
    assert llm.abort(request_id)
    (output,) = llm.step()
    assert (output.request_id, output.outputs[0].finish_reason) == (request_id, "abort")


def test_a_step_without_work_returns_nothing(llm):
    assert not llm.has_unfinished_requests()
    assert llm.step() == []


def test_a_prompt_that_cannot_be_served_is_not_queued(llm):
    with pytest.raises(ValueError, match="empty"):
        llm.add_request([])
    assert not llm.has_unfinished_requests()
