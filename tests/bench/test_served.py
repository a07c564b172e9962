"""Measurements of a server: figures from known readings, and readings of a server whose answers are scripted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from jaxinfer.bench.http import Address
from jaxinfer.bench.served import Reading, ServedMeasurement
from jaxinfer.bench.served_driver import Target, run_served
from jaxinfer.bench.summary import Summary
from jaxinfer.bench.texts import TEXT_WORKLOADS
from jaxinfer.bench.workload import LengthRange
from tests.bench.toy_server import END, HEAD, chunk, delta, toy_server, usage, whole

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def read(script, *bodies, endpoint="chat", **options):
    """Readings of requests to a server with a script, and the server."""
    with toy_server(script) as server:
        target = Target(Address.parse(server.url), endpoint, timeout=options.pop("timeout", 30.0))
        readings, _ = asyncio.run(run_served(target, bodies, **options))
    return readings, server


# Figures


def test_latencies_follow_from_the_times_of_pieces():
    readings = [
        Reading(10.0, 12.5, times=[10.5, 11.0, 12.0], prompt_tokens=7, cached_tokens=4, output_tokens=4),
        Reading(10.0, 11.0, times=[10.25, 10.75], prompt_tokens=3, output_tokens=6),
    ]
    measured = ServedMeasurement.of(readings, 5.0)
    assert measured.time_to_first_token == Summary.of([0.5, 0.25])
    assert measured.time_per_output_token == Summary.of([1.5 / 3, 0.5 / 5])
    assert measured.time_between_pieces == Summary.of([0.5, 1.0, 0.5])
    assert measured.latency == Summary.of([2.5, 1.0])
    assert measured.inter_token_latency is None
    assert (measured.prompt_tokens, measured.cached_tokens, measured.output_tokens) == (10, 4, 10)
    assert (measured.output_tokens_per_second, measured.requests_per_second) == (2.0, 0.4)


def test_tokens_of_one_piece_share_its_time_where_their_number_is_known():
    reading = Reading(0.0, 4.0, times=[1.0, 2.0, 2.5, 3.5], counts=[1, 3, 3, 6], output_tokens=6)
    measured = ServedMeasurement.of([reading], 4.0)
    # Two tokens in the first second, and three in the second and a half since: a piece without a token is no landing.
    assert measured.inter_token_latency == Summary.of([0.5, 0.5, 0.5, 0.5, 0.5])


def test_failed_requests_are_counted_apart_by_their_errors():
    failed = [Reading(0.0, 1.0, error="refused"), Reading(0.0, 9.0, error="refused"), Reading(0.0, 9.0, error="late")]
    measured = ServedMeasurement.of([*failed, Reading(0.0, 1.0, prompt_tokens=2, output_tokens=3)], 1.0)
    assert (measured.num_requests, measured.num_failed) == (1, 3)
    assert measured.errors == {"refused": 2, "late": 1}
    assert measured.output_tokens == 3 and measured.latency == Summary.of([1.0])


def test_whole_answers_have_no_first_token():
    measured = ServedMeasurement.of([Reading(0.0, 2.0, output_tokens=3)], 2.0)
    assert measured.time_to_first_token is None and measured.time_per_output_token is None


def test_an_answer_of_one_piece_says_nothing_of_the_time_per_token():
    measured = ServedMeasurement.of([Reading(0.0, 2.0, times=[1.0], output_tokens=3)], 2.0)
    assert measured.time_to_first_token == Summary.of([1.0]) and measured.time_per_output_token is None


# Readings


def test_tokens_are_those_of_the_usage_however_many_pieces_there_are():
    def script(body):
        yield HEAD + chunk(delta(role="assistant", content=""))
        yield chunk(delta(content="one two")) + chunk(delta(content=" three"))
        yield chunk({"choices": [], "usage": usage(11, 25, cached=8)}) + END

    (reading,), _ = read(script, STREAM)
    assert reading.error is None and len(reading.times) == 2
    assert (reading.prompt_tokens, reading.cached_tokens, reading.output_tokens) == (11, 8, 25)


def test_the_first_token_comes_with_the_first_text_and_not_with_the_role():
    sent: list[float] = []

    def script(body):
        yield HEAD + chunk(delta(role="assistant", content=""))
        time.sleep(0.2)
        sent.append(time.perf_counter())
        yield chunk(delta(content="one"))
        time.sleep(0.1)
        sent.append(time.perf_counter())
        yield chunk(delta(content="two")) + chunk({"choices": [], "usage": usage(1, 2)}) + END

    (reading,), _ = read(script, STREAM)
    first, second = reading.times
    assert first >= sent[0] and second >= sent[1] and reading.end >= second


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "tool_calls", "content"])
def test_reasoning_and_calls_are_text(name):
    def script(body):
        value = [{"index": 0}] if name == "tool_calls" else "x"
        yield HEAD + chunk(delta(**{name: value})) + chunk({"choices": [], "usage": usage(1, 1)}) + END

    (reading,), _ = read(script, STREAM)
    assert reading.error is None and len(reading.times) == 1


def test_completions_have_their_text_elsewhere():
    def script(body):
        yield HEAD + chunk({"choices": [{"index": 0, "text": "one"}]}) + chunk({"choices": [{"index": 0, "text": ""}]})
        yield chunk({"choices": [], "usage": usage(2, 1)}) + END

    (reading,), server = read(script, STREAM, endpoint="completions")
    assert reading.error is None and len(reading.times) == 1
    assert server.asked[0][0] == "/v1/completions"


def test_usage_in_pieces_counts_the_tokens_of_each():
    def script(body):
        for count in (1, 4):
            yield (HEAD if count == 1 else b"") + chunk(delta(content="x") | {"usage": usage(5, count)})
        yield chunk({"choices": [], "usage": usage(5, 4)}) + END

    (reading,), _ = read(script, STREAM)
    assert reading.counts == [1, 4] and reading.output_tokens == 4


def test_events_may_come_in_any_pieces():
    text = HEAD + chunk(delta(content="one")) + chunk({"choices": [], "usage": usage(3, 4)}) + END
    (reading,), _ = read(lambda body: [bytes([byte]) for byte in text], STREAM)
    assert reading.error is None and (reading.prompt_tokens, reading.output_tokens) == (3, 4)


def test_a_whole_answer_has_its_usage():
    (reading,), _ = read(lambda body: [whole({"choices": [], "usage": usage(6, 9)})], {"stream": False})
    assert reading.error is None and reading.times == [] and reading.output_tokens == 9


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([whole({"error": {"message": "too busy"}}, 503)], "status 503: too busy"),
        ([b"HTTP/1.1 502 x\r\ncontent-length: 3\r\n\r\nbad"], "status 502: bad"),
        ([HEAD + chunk(delta(content="x")) + END], "no usage"),
        ([HEAD + chunk(delta(content="x")) + b"0\r\n\r\n"], "without [DONE]"),
        ([HEAD + chunk({"error": {"message": "gone wrong"}}) + END], "gone wrong"),
        ([HEAD + chunk(delta(content="x"))], "IncompleteReadError"),
        ([HEAD + chunk("{")], "JSONDecodeError"),
        ([HEAD + chunk('"text"')], "not an answer of OpenAI's API"),
        ([HEAD + chunk({"usage": {}, "choices": [], "more": 1}) + chunk({"usage": {"a": 1}}) + END], "prompt_tokens"),
        ([b"SSH-2.0\r\n\r\n"], "not a response of HTTP"),
        ([b""], "IncompleteReadError"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_a_failed_request_with_its_reason(pieces, says):
    (reading,), _ = read(lambda body: pieces, STREAM)
    assert reading.error is not None and says in reading.error


def test_a_server_that_is_not_there_fails_each_request():
    with toy_server(lambda body: []) as server:
        address = Address.parse(server.url)
    readings, _ = asyncio.run(run_served(Target(address, "chat"), [{}, {}]))
    assert all("ConnectionRefusedError" in (reading.error or "") for reading in readings)


def test_a_request_that_takes_too_long_has_failed():
    release = threading.Event()

    def script(body):
        release.wait(30)
        return [whole({"usage": usage(1, 1)})]

    with toy_server(script) as server:
        target = Target(Address.parse(server.url), "chat", timeout=0.2)
        (reading,), _ = asyncio.run(run_served(target, [{}]))
        release.set()
    assert reading.error == "no answer within 0.2 seconds"


def test_concurrency_limits_the_requests_that_are_unanswered():
    lock, numbers = threading.Lock(), [0]

    def script(body):
        with lock:
            numbers.append(numbers[-1] + 1)
        time.sleep(0.02)
        # Before the answer is sent: the client sends the next request as soon as it has read it.
        with lock:
            numbers.append(numbers[-1] - 1)
        return [whole({"usage": usage(1, 1)})]

    readings, _ = read(script, *[{}] * 9, concurrency=3)
    assert max(numbers) == 3 and all(reading.error is None for reading in readings)
    assert len({reading.begin for reading in readings}) == 9, "a request that was held back arrives when it is sent"


def test_requests_come_when_they_arrive():
    come: list[float] = []

    def script(body):
        come.append(time.perf_counter())
        return [whole({"usage": usage(1, 1)})]

    readings, _ = read(script, {}, {}, arrivals=[0.0, 0.3])
    assert come[1] >= readings[1].begin
    assert readings[1].begin - readings[0].begin == pytest.approx(0.3)


def test_time_that_an_arrived_request_is_held_back_counts():
    def script(body):
        time.sleep(0.2)
        return [whole({"usage": usage(1, 1)})]

    readings, _ = read(script, {}, {}, arrivals=[0.0, 0.0], concurrency=1)
    assert max(reading.end - reading.begin for reading in readings) > 0.39


def test_arguments_out_of_range_are_refused():
    target = Target(Address("127.0.0.1", 1), "chat")
    with pytest.raises(ValueError, match="1 arrivals for 2 requests"):
        asyncio.run(run_served(target, [{}, {}], arrivals=[0.0]))
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        asyncio.run(run_served(target, [{}], concurrency=0))


# Addresses and workloads


def test_addresses_are_read():
    assert Address.parse("http://127.0.0.1:8000/v1/") == Address("127.0.0.1", 8000, False, "/v1")
    assert Address.parse("https://host") == Address("host", 443, True, "")
    assert (
        Address.parse("http://[::1]:81/v1").encode("GET", "/x").startswith(b"GET /v1/x HTTP/1.1\r\nhost: [::1]:81\r\n")
    )
    for url in ("127.0.0.1:8000", "ftp://host/", "http://"):
        with pytest.raises(ValueError, match="an address is written"):
            Address.parse(url)


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_texts_have_their_lengths_and_are_the_same_again(name):
    make = TEXT_WORKLOADS[name]
    items = make(40, LengthRange(10, 20), LengthRange(3, 5), 7)
    lengths = {len(str(item.prompt).split()) for item in items}
    assert min(lengths) >= 10 and max(lengths) <= 20 and len(lengths) > 4
    assert {item.max_tokens for item in items} == {3, 4, 5}
    assert (
        items
        == make(40, LengthRange(10, 20), LengthRange(3, 5), 7)
        != make(40, LengthRange(10, 20), LengthRange(3, 5), 8)
    )
    with pytest.raises(ValueError, match="num_requests must be at least 1"):
        make(0, LengthRange(1, 1), LengthRange(1, 1), 0)


def test_shared_prefixes_are_half_of_each_prompt():
    def common(name):
        first, *others = (
            str(item.prompt).split() for item in TEXT_WORKLOADS[name](5, LengthRange(20, 20), LengthRange(1, 1), 0)
        )
        return [next(i for i in range(20) if first[i] != other[i]) for other in others]

    assert all(10 <= count < 14 for count in common("shared-prefix"))
    assert all(count < 4 for count in common("random"))


def test_measuring_a_server_loads_no_engine():
    code = "import jaxinfer.cli.bench_serve, sys; print(*{'jax', 'flax', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
