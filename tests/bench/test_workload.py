"""Workloads: random ones within their bounds and repeatable, files checked line by line, Poisson arrivals."""

import json

import numpy as np
import pytest

from jaxinfer.bench.workload import (
    LengthRange,
    WorkItem,
    fitting_scale,
    poisson_arrivals,
    random_workload,
    read_workload,
)

SETTINGS = {"num_requests": 200, "input_len": LengthRange(3, 9), "output_len": LengthRange(20, 22), "vocab_size": 50}


def write_lines(tmp_path, *entries):
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))
    return file


def test_the_same_seed_gives_the_same_random_requests():
    assert random_workload(**SETTINGS, seed=1) == random_workload(**SETTINGS, seed=1)


def test_another_seed_gives_other_random_requests():
    assert random_workload(**SETTINGS, seed=1) != random_workload(**SETTINGS, seed=2)


def test_random_lengths_take_every_value_of_their_ranges_and_no_other():
    items = random_workload(**SETTINGS, seed=0)
    assert len(items) == 200
    assert {len(item.prompt["prompt_token_ids"]) for item in items} == set(range(3, 10))
    assert {item.max_tokens for item in items} == {20, 21, 22}


def test_random_tokens_take_every_value_of_the_vocabulary_and_no_other():
    items = random_workload(**SETTINGS, seed=0)
    assert {token for item in items for token in item.prompt["prompt_token_ids"]} == set(range(50))


@pytest.mark.parametrize("name", ["num_requests", "vocab_size"])
def test_random_requests_need_at_least_one_request_and_one_word(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        random_workload(**{**SETTINGS, name: 0}, seed=0)


@pytest.mark.parametrize(("text", "expected"), [("100:1024", (100, 1024)), ("64", (64, 64)), ("1:1", (1, 1))])
def test_a_range_of_lengths_is_written_with_a_colon_or_as_one_number(text, expected):
    found = LengthRange.parse(text)
    assert (found.shortest, found.longest) == expected


@pytest.mark.parametrize("text", ["", "a:b", "1:2:3", "-1:4", "5:4", "0:4", "1.5:2", "8:"])
def test_what_is_no_range_of_lengths_is_refused(text):
    with pytest.raises(ValueError, match="a range of lengths"):
        LengthRange.parse(text)


def test_scaling_rounds_down_and_keeps_one_token():
    assert LengthRange(100, 1024).scaled(0.25) == LengthRange(25, 256)
    assert LengthRange(3, 10).scaled(0.1) == LengthRange(1, 1)


@pytest.mark.parametrize("max_model_len", [2, 7, 100, 1000, 2047])
def test_the_fitting_scale_makes_the_longest_request_fit_and_wastes_little(max_model_len):
    inputs, outputs = LengthRange(100, 1024), LengthRange(100, 1024)
    scale = fitting_scale(inputs, outputs, max_model_len)
    longest = inputs.scaled(scale).longest + outputs.scaled(scale).longest
    assert max_model_len - 2 <= longest <= max_model_len


def test_lengths_that_fit_are_not_scaled():
    assert fitting_scale(LengthRange(1, 10), LengthRange(1, 10), 20) == 1.0


def test_a_model_without_room_for_an_output_has_no_fitting_scale():
    with pytest.raises(ValueError, match="max_model_len=1"):
        fitting_scale(LengthRange(1, 10), LengthRange(1, 10), 1)


def test_a_file_holds_text_and_token_prompts(tmp_path):
    file = write_lines(tmp_path, {"prompt": "Hi", "max_tokens": 3}, "", {"prompt_token_ids": [1, 2], "max_tokens": 4})
    assert read_workload(file) == [WorkItem("Hi", 3), WorkItem({"prompt_token_ids": [1, 2]}, 4)]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("not json", "Expecting value"),
        ([1], "must be an object"),
        ({"max_tokens": 1}, "one of prompt and prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1], "max_tokens": 1}, "one of prompt and prompt_token_ids"),
        ({"prompt": 5, "max_tokens": 1}, "prompt must be a string, got 5"),
        ({"prompt": "a"}, "max_tokens must be an integer of at least 1, got None"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be an integer of at least 1, got True"),
        ({"prompt": "a", "max_tokens": 1, "stop": "b"}, "unknown fields stop"),
    ],
)
def test_a_bad_line_of_a_file_is_named_with_the_reason(tmp_path, entry, reason):
    file = write_lines(tmp_path, {"prompt": "Hi", "max_tokens": 3}, entry)
    with pytest.raises(ValueError, match=f"line 2 of .*requests.jsonl: .*{reason}"):
        read_workload(file)


def test_a_file_without_requests_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no requests"):
        read_workload(write_lines(tmp_path))


def test_poisson_arrivals_grow_and_are_the_same_for_the_same_seed():
    arrivals = poisson_arrivals(num_requests=100, request_rate=5.0, seed=3)
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    assert arrivals == poisson_arrivals(num_requests=100, request_rate=5.0, seed=3)


def test_poisson_arrivals_come_at_the_rate_asked_for_and_vary_as_a_poisson_process_does():
    count, rate = 20_000, 8.0
    gaps = np.diff(poisson_arrivals(num_requests=count, request_rate=rate, seed=0))
    # The standard error of the mean is mean / sqrt(count) = 0.7%; that of the standard deviation about 1%.
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.std() == pytest.approx(1 / rate, rel=0.05)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_not_positive_is_refused(rate):
    with pytest.raises(ValueError, match="request_rate must be above 0"):
        poisson_arrivals(num_requests=1, request_rate=rate, seed=0)
