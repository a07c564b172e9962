"""Percentiles, the recorder's counts, and the rates that follow from them."""

import dataclasses

import pytest

from jaxinfer.bench.measurement import Measurement, RecordingHistogram
from jaxinfer.bench.report import milliseconds
from jaxinfer.bench.summary import Summary

MEASURED = Measurement(
    num_requests=4, prompt_tokens=30, output_tokens=50, seconds=2.0,
    time_to_first_token=Summary(0.1, 0.1, 0.15, 0.2, 0.3), inter_token_latency=None, steps=20, launches=10,
    mean_batch=2.5, host_ms_per_step=0.5, preemptions=1, compiles=0,
)  # fmt: skip


def test_a_summary_has_the_mean_and_linearly_interpolated_percentiles():
    summary = Summary.of([float(value) for value in range(1, 102)])
    assert summary is not None
    assert summary.mean == pytest.approx(51.0)
    assert (summary.p50, summary.p90, summary.p95, summary.p99) == pytest.approx((51.0, 91.0, 96.0, 100.0))
    assert Summary.of([1.0, 2.0]) == Summary(1.5, 1.5, *(pytest.approx(value) for value in (1.9, 1.95, 1.99)))


def test_the_order_of_observations_does_not_matter():
    assert Summary.of([3.0, 1.0, 2.0]) == Summary.of([1.0, 2.0, 3.0])


def test_a_value_that_was_observed_several_times_counts_so_often():
    assert Summary.of([1.0, 5.0], [3, 1]) == Summary.of([1.0, 1.0, 1.0, 5.0])


def test_of_nothing_there_is_no_summary():
    assert Summary.of([]) is None
    assert milliseconds(None) == "-"


def test_a_recording_histogram_counts_as_a_histogram_and_keeps_the_values():
    histogram = RecordingHistogram()
    histogram.observe(0.25, 3)
    histogram.observe(1.0)
    assert (histogram.count, histogram.sum) == (4, 1.75)
    assert histogram.summary() == Summary.of([0.25, 0.25, 0.25, 1.0])


def test_rates_are_per_second_of_the_run():
    assert MEASURED.output_tokens_per_second == 25.0
    assert MEASURED.total_tokens_per_second == 40.0
    assert MEASURED.requests_per_second == 2.0


def test_the_json_has_every_field_and_every_rate():
    names = {field.name for field in dataclasses.fields(Measurement)}
    rates = {"output_tokens_per_second", "total_tokens_per_second", "requests_per_second"}
    assert MEASURED.as_json().keys() == names | rates
    assert MEASURED.as_json()["time_to_first_token"] == {
        "mean": 0.1, "p50": 0.1, "p90": 0.15, "p95": 0.2, "p99": 0.3,
    }  # fmt: skip


def test_seconds_are_shown_in_milliseconds():
    assert milliseconds(Summary(0.0125, 0.001, 0.01, 0.02, 1.5)) == "12.50 / 1.00 / 10.00 / 20.00 / 1500.00"
