"""What a user gets back: defaults, and what follows from the fields."""

import pytest

from jaxinfer import CompletionOutput, RequestOutput
from jaxinfer.outputs import RequestMetrics


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_a_completion_with_a_finish_reason_is_finished(reason):
    assert CompletionOutput(0, "text", [1], finish_reason=reason).finished


def test_a_completion_without_a_finish_reason_is_not_finished():
    completion = CompletionOutput(index=0, text="text", token_ids=[1])
    assert not completion.finished
    assert (completion.finish_reason, completion.stop_reason) == (None, None)
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


def test_time_to_first_token_counts_from_the_arrival():
    assert RequestMetrics(arrival_time=10.0).time_to_first_token is None
    assert RequestMetrics(arrival_time=10.0, first_token_time=10.25).time_to_first_token == 0.25


def test_an_output_prints_without_its_times():
    completion = CompletionOutput(0, "text", [5])
    output = RequestOutput("3", "prompt", [1, 2], [completion], finished=True, metrics=RequestMetrics(10.0))
    assert "text='text'" in repr(output) and "request_id='3'" in repr(output)
    assert "arrival_time" not in repr(output)
