"""The pace learns from past launches how long rounds take, and chooses the number of rounds of the next one."""

import time

import pytest

from jaxinfer.engine.launcher import Launcher
from jaxinfer.scheduling.pace import Pace
from tests.builders import make_request, run_requests

pytestmark = pytest.mark.measured


def pace_of(launch: float, each: float, rounds=(1, 4, 2, 8), times: int = 3) -> Pace:
    """The pace of an engine whose launches take `launch` seconds, and each round `each` more."""
    pace = Pace()
    for number in rounds * times:
        pace.note("kind", number, launch + each * number)
    return pace


@pytest.mark.parametrize(("launch", "each", "expected"), [(0.0, 0.01, 5), (0.02, 0.01, 3), (0.04, 0.02, 1), (0, 1, 1)])
def test_rounds_fit_into_the_time_that_there_is(launch, each, expected):
    assert pace_of(launch, each).within("kind", 0.0501) == expected


def test_launches_of_one_length_are_taken_to_cost_their_rounds():
    assert pace_of(0.005, 0.005, rounds=(1,)).within("kind", 0.0501) == 5


def test_of_what_is_not_known_a_launch_has_one_round():
    pace = pace_of(0.0, 0.001)
    assert pace.within("other", 1.0) == 1
    assert pace.beside_one_round("other", 8, num_rows=7, num_of_one_round=1) == 1


def test_what_was_long_ago_is_forgotten():
    pace = pace_of(0.0, 0.04)
    for _ in range(200):
        pace.note("kind", 1, 0.005)
    assert pace.within("kind", 0.0525) == 10


@pytest.mark.parametrize(
    ("launch", "each", "num_rows", "num_of_one_round", "expected"),
    [
        (0.0, 0.01, 7, 1, 1),  # one round is as good as many
        (0.01, 0.01, 7, 1, 3),  # 0.04 s for 0.02
        (0.03, 0.01, 7, 1, 5),
        (0.03, 0.01, 1, 7, 1),  # most rows would wait for one
        (0.3, 0.01, 7, 1, 16),  # no more than there may be
        (0.01, 0.01, 0, 8, 1),
    ],
)
def test_rows_of_one_round_wait_twice_as_long_at_most(launch, each, num_rows, num_of_one_round, expected):
    pace = pace_of(launch, each)
    found = pace.beside_one_round("kind", 16, num_rows=num_rows, num_of_one_round=num_of_one_round)
    assert found == expected


def test_seconds_that_fall_with_rounds_are_no_negative_ones():
    pace = Pace()
    for rounds, seconds in ((1, 0.2), (8, 0.1)) * 5:
        pace.note("kind", rounds, seconds)
    assert pace.within("kind", 0.05) == 1
    assert 1 <= pace.beside_one_round("kind", 8, num_rows=3, num_of_one_round=1) <= 8


def pace_with_steps(mixed: float, alone: float, launch: float, each: float) -> Pace:
    pace = pace_of(launch, each)
    for _ in range(3):
        pace.note("mixed", 1, mixed)
        pace.note("alone", 1, alone)
    return pace


@pytest.mark.parametrize(
    ("mixed", "alone", "launch", "each", "tokens", "waits", "goes_on", "expected"),
    [
        (0.06, 0.06, 0.0, 0.012, 1.0, False, True, 5),  # five tokens in 0.12 s, not one in 0.06
        (0.06, 0.06, 0.0, 0.012, 1.0, False, False, 0),  # the step gives them a token for nothing, and rounds come next
        (0.06, 0.06, 0.0, 0.012, 1.0, True, True, 0),
        (0.02, 0.02, 0.0, 0.015, 1.0, False, True, 0),  # one token in 0.035 s is less than one in 0.02
        (0.02, 0.02, 0.0, 0.015, 3.0, False, True, 1),  # but three are more
        (0.02, 0.02, 0.01, 0.015, 3.0, False, True, 0),  # the prompts would wait for more than twice as long
        (0.06, 0.03, 0.0, 0.01, 1.0, True, True, 9),  # the step takes 0.03 s longer for a token of each
        (0.06, 0.03, 0.0, 0.01, 1.0, False, False, 9),
        (1.0, 0.5, 0.0, 0.01, 1.0, False, True, 16),  # no more than there may be
    ],
)
def test_rounds_beside_chunks(mixed, alone, launch, each, tokens, waits, goes_on, expected):
    pace = pace_with_steps(mixed, alone, launch, each)
    found = pace.beside_chunks("kind", 16, tokens, mixed="mixed", alone="alone", waits=waits, goes_on=goes_on)
    assert found == expected


def test_beside_chunks_what_is_not_known_is_tried_once():
    def chosen() -> int:
        return pace.beside_chunks("kind", 16, 1.0, mixed="mixed", alone="alone", waits=False, goes_on=True)

    pace = Pace()
    assert chosen() == 0, "a step with all rows comes first"
    pace.note("mixed", 1, 0.02)
    assert chosen() == 2
    pace.note("alone", 1, 0.02)
    pace.note("kind", 2, 0.2)
    assert chosen() == 0


@pytest.mark.parametrize(("each", "usual"), [(0.001, 16), (0.1, 0)])
def test_now_and_then_it_is_the_other_way_round(each, usual):
    pace = pace_with_steps(0.02, 0.02, 0.0, each)
    found = [
        pace.beside_chunks("kind", 16, 1.0, mixed="mixed", alone="alone", waits=False, goes_on=True) for _ in range(200)
    ]
    assert found.count(usual) == 196 and len(set(found)) == 2


@pytest.mark.parametrize("compiles", [False, True])
def test_launches_beside_which_something_is_compiled_are_not_timed(compiles, idle_engine, monkeypatch):
    core, timed = idle_engine(), []
    run_requests(core, [make_request("0", [1, 2, 3], max_tokens=60)])  # compiles
    launch = Launcher.launch

    def beside_a_compile(self, rounds) -> bool:
        found = launch(self, rounds)
        core.metrics.num_compiles_total += compiles
        return found

    monkeypatch.setattr(Launcher, "launch", beside_a_compile)
    monkeypatch.setattr(Pace, "note", lambda self, kind, rounds, seconds: timed.append(seconds))
    run_requests(core, [make_request("1", [4, 5, 6], max_tokens=60)])
    assert bool(timed) != compiles


def test_a_launch_that_was_left_in_flight_is_not_timed(idle_engine, monkeypatch):
    """It was launched ahead of the token that ended the last sequence, and is read with the next request's."""
    core, timed, noted = idle_engine(), [], []
    [tokens] = run_requests(core, [make_request("0", [1, 2, 3], max_tokens=60)])
    for name in ("compiles", "1"):  # a launch that waits for its compile is not left in flight
        core.add_request(make_request(name, [1, 2, 3], max_tokens=60, eos_token_ids=[tokens[4]]))
        while core.has_unfinished_requests():
            core.step()
    assert core.launcher.num_in_flight == 1
    landed = core.strategy.landed

    def listen(output, built, result, steps, seconds, metrics):
        timed.append(seconds)
        return landed(output, built, result, steps, seconds, metrics)

    monkeypatch.setattr(core.strategy, "landed", listen)
    monkeypatch.setattr(Pace, "note", lambda self, kind, rounds, seconds: noted.append(seconds))
    time.sleep(3.0)
    for number in range(5):  # on a busy machine results may be there before they are read, which are not timed
        run_requests(core, [make_request(f"after {number}", [4, 5, 6 + number], max_tokens=60)])
    assert timed[0] == 0.0 and 0.0 < max(timed) < 3.0 and 0.0 < max(noted) < 3.0
