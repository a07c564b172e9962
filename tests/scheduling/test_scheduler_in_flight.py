"""Launches that follow each other before their results are read, and several decode steps in one launch."""

from dataclasses import replace

import pytest

from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.scheduling.rounds import Rounds, RowKind
from tests.builders import make_request
from tests.engine.fake_device import VOCAB, Simulation, expected_output

pytestmark = pytest.mark.measured


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def test_a_launch_can_follow_one_whose_results_were_not_read():
    sim = Simulation()
    request = sim.add(make_request("a", prompt(5), max_tokens=3))
    outputs = [sim.launch() for _ in range(3)]
    assert [output.num_scheduled_tokens for output in outputs] == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert request.output_token_ids == [] and request.num_in_flight == 3
    for _ in range(3):
        sim.land()
    assert request.output_token_ids == expected_output(prompt(5), 3)
    assert request.status is RequestStatus.FINISHED_LENGTH and request.num_in_flight == 0


def test_only_the_last_chunk_of_a_prompt_samples():
    sim = Simulation(budget=8)
    sim.add(make_request("a", prompt(20)))
    assert [sim.launch().samples for _ in range(4)] == [[False], [False], [True], [True]]


def test_pages_for_rounds_that_do_not_run_are_known_to_the_step_that_does(monkeypatch):
    sim = Simulation(budget=4, max_decode_steps=4, beside=lambda most: most)
    monkeypatch.setattr(sim.scheduler.pace, "within", lambda kind, seconds: 1)
    first = sim.add(make_request("a", prompt(3), max_tokens=20))
    sim.step()
    # Its last chunk fills a page that it has. A round after that would need another, but one alone is worth nothing.
    second = sim.add(make_request("b", prompt(8, 20), max_tokens=3))
    first.stream = second.stream = True
    sim.drain(max_steps=30)
    assert second.output_token_ids == expected_output(prompt(8, 20), 3)
    assert first.output_token_ids == expected_output(prompt(3), 20)


def test_a_request_whose_last_token_is_in_flight_is_not_launched_again():
    sim = Simulation()
    sim.add(make_request("a", prompt(5), max_tokens=2))
    sim.launch()
    sim.launch()
    assert sim.launch().requests == []
    sim.drain()


def test_a_landing_says_whose_tokens_came_and_which():
    sim = Simulation()
    first, second = (sim.add(make_request(name, prompt(4, ord(name)), max_tokens=4)) for name in "ab")
    sim.launch()
    sim.launch()
    for at in (4, 5):
        landings = sim.land()
        assert [landing.request for landing in landings] == [first, second]
        assert [(landing.first, landing.last) for landing in landings] == [(at, at + 1)] * 2
    sim.drain()


def test_what_was_launched_for_a_request_that_has_ended_since_is_dropped():
    sim = Simulation()
    tokens = expected_output(prompt(5), 2)
    request = sim.add(make_request("a", prompt(5), eos_token_ids=[tokens[1]]))
    for _ in range(3):
        sim.launch()
    assert [len(sim.land()) for _ in range(3)] == [1, 1, 0]
    assert request.output_token_ids == tokens and request.status is RequestStatus.FINISHED_STOPPED
    assert sim.scheduler.kv.allocator.num_held == 0


def test_what_was_launched_for_an_aborted_request_is_dropped():
    sim = Simulation()
    request = sim.add(make_request("a", prompt(3)))
    sim.launch()
    sim.launch()
    sim.end([request], RequestStatus.FINISHED_ABORTED)
    sim.scheduler.check_integrity()
    assert [sim.land(), sim.land()] == [[], []]
    assert request.output_token_ids == [] and not sim.scheduler.has_unfinished_requests()


def crowded() -> tuple[Simulation, list]:
    """Three requests whose first tokens are in flight and which hold all 6 pages."""
    sim = Simulation(num_pages=6, page_size=4)
    requests = [sim.add(make_request(name, prompt(8, 70 * i), max_tokens=6)) for i, name in enumerate("abc")]
    sim.launch()
    return sim, requests


def test_what_was_launched_before_a_preemption_is_dropped_and_sampled_again():
    sim, (*_, last) = crowded()
    assert sim.launch().preempted_req_ids == {"c"}
    assert [landing.request.request_id for landing in sim.land()] == ["a", "b"]
    assert last.output_token_ids == [] and last.num_in_flight == 0
    sim.drain()
    assert last.output_token_ids == expected_output(prompt(8, 140), 6)


def test_a_request_that_came_back_takes_no_result_from_before_its_preemption():
    sim, (first, second, last) = crowded()
    sim.launch()
    sim.end([first, second], RequestStatus.FINISHED_ABORTED)
    assert sim.launch().num_scheduled_tokens == {"c": 8}
    assert [sim.land(), sim.land()] == [[], []]
    assert last.output_token_ids == []
    assert [landing.request for landing in sim.land()] == [last]
    sim.drain()
    assert last.output_token_ids == expected_output(prompt(8, 140), 6)


def test_a_request_under_the_id_of_an_aborted_one_takes_none_of_its_results():
    sim = Simulation()
    old = sim.add(make_request("same", prompt(3)))
    sim.launch()
    sim.end([old], RequestStatus.FINISHED_ABORTED)
    new = sim.add(make_request("same", prompt(7, 20), max_tokens=2))
    sim.launch()
    assert sim.land() == []
    sim.drain()
    assert new.output_token_ids == expected_output(prompt(7, 20), 2) and old.output_token_ids == []


def decoding(*requests, **limits) -> Simulation:
    """A simulation whose requests have all computed their prompts, with up to 8 decode steps in a launch."""
    sim = Simulation(max_decode_steps=8, **limits)
    for request in requests:
        sim.add(request)
    assert sim.step().num_rounds == 0, "a step that computes prompts is no loop"
    return sim


def test_requests_that_all_decode_run_several_steps_in_one_launch():
    request = make_request("a", prompt(5), max_tokens=20)
    sim = decoding(request)
    sim.launch()
    (landing,) = sim.land()
    assert (landing.first, landing.last) == (6, 14)
    assert request.output_token_ids == expected_output(prompt(5), 9)


def test_a_request_that_reaches_its_length_leaves_the_loop_to_the_others():
    short, long = make_request("a", prompt(5), max_tokens=4), make_request("b", prompt(5), max_tokens=20)
    sim = decoding(short, long)
    output = sim.launch()
    assert (output.num_rounds, output.most_tokens) == (8, [3, 8])
    sim.land()
    assert short.status is RequestStatus.FINISHED_LENGTH and long.num_output_tokens == 9
    sim.drain()
    assert [short.output_token_ids, long.output_token_ids] == [expected_output(prompt(5), n) for n in (4, 20)]


def test_a_loop_is_no_longer_than_its_longest_request():
    sim = decoding(make_request("a", prompt(5), max_tokens=3), make_request("b", prompt(5), max_tokens=5))
    assert sim.launch().num_rounds == 4
    sim.drain()


def test_a_request_may_end_in_the_middle_of_a_loop():
    tokens = expected_output(prompt(5), 9)
    short = make_request("a", prompt(5), max_tokens=20, eos_token_ids=[tokens[3]])
    long = make_request("b", prompt(7), max_tokens=20)
    sim = decoding(short, long)
    sim.step()
    assert short.output_token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert long.output_token_ids == expected_output(prompt(7), 9)
    sim.drain()


def test_a_loop_that_all_requests_leave_early_brings_their_tokens_and_no_more():
    tokens = expected_output(prompt(5), 9)
    request = make_request("a", prompt(5), max_tokens=20, eos_token_ids=[tokens[3]])
    sim = decoding(request)
    sim.step()
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.output_token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert sim.scheduler.kv.allocator.num_held == 0


def test_a_loop_follows_a_loop_that_was_not_read():
    request = make_request("a", prompt(5), max_tokens=30)
    sim = decoding(request)
    assert [sim.launch().num_rounds for _ in range(2)] == [8, 8]
    sim.drain()
    assert request.output_token_ids == expected_output(prompt(5), 30)


@pytest.mark.parametrize(
    "parameters",
    [
        {"stop": ["x"]}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": list(range(VOCAB))}, {"stop_token_ids": list(range(100, 120))}, {"min_tokens": 4},
        {"bad_token_ids": [(3,)]}, {"bad_token_ids": [(3, 4)]}, {"logprobs": 2},
    ],
    ids=lambda parameters: next(iter(parameters)),
)  # fmt: skip
def test_what_lies_with_a_seat_or_is_seen_behind_a_launch_shortens_no_loop(parameters):
    sim = decoding(make_request("a", prompt(5), max_tokens=20), make_request("b", [1], max_tokens=20, **parameters))
    assert sim.launch().rounds_of == [8, 8]


def refusing(request):
    """The request, whose guard has refused most tokens of late."""
    for _ in range(10):
        request.note_refusals(0, is_refused=True)
    return request


def test_a_row_that_the_host_looks_at_takes_one_round_and_the_others_go_on():
    refused = refusing(make_request("b", [1, 2], max_tokens=9, bad_token_ids=[(3, 4)]))
    sim = decoding(make_request("a", prompt(5), max_tokens=40), refused)
    assert sim.step().rounds_of == [1, 1], "nothing is known of how long launches take"
    for rounds in (1, 4, 1, 4):
        sim.scheduler.pace.note(RowKind.DECODE, rounds, 0.06 + 0.01 * rounds)
    output = sim.launch()
    assert (output.rounds_of, output.most_tokens) == ([8, 1], [8, 1])
    sim.drain()
    requests = [request for request in output.requests]
    assert [request.output_token_ids for request in requests] == [
        expected_output(prompt(5), 40), expected_output([1, 2], 9),
    ]  # fmt: skip


def test_a_row_whose_next_draw_needs_its_token_sits_out_until_that_has_landed():
    refused = refusing(make_request("b", [1, 2], max_tokens=30, bad_token_ids=[(3, 4)]))
    sim = decoding(make_request("a", prompt(5), max_tokens=40), refused)
    taking_part = []
    for _ in range(6):
        taking_part.append(sorted(sim.launch().num_scheduled_tokens))
        if len(sim.in_flight) > 1:
            sim.land()
    assert taking_part == 3 * [["a", "b"], ["a"]]
    sim.drain()


def test_a_stream_takes_as_many_rounds_as_keep_its_tokens_from_being_late():
    streamed = make_request("a", prompt(5), max_tokens=20, stream=True)
    sim = decoding(streamed, make_request("b", prompt(5), max_tokens=20))
    assert sim.step().rounds_of == [1, 1], "nothing is known of how long launches take"
    for _ in range(3):
        sim.scheduler.pace.note(RowKind.DECODE, 1, 0.012)
    assert sim.launch().rounds_of == [4, 4]


def test_while_a_request_waits_a_loop_ends_with_the_first_place_that_gets_free():
    sim = decoding(
        *(make_request(name, prompt(5), max_tokens=n) for name, n in (("a", 20), ("b", 6), ("c", 9))), rows=2
    )
    assert sim.step().num_rounds == 5
    assert "c" in sim.launch().num_scheduled_tokens
    sim.drain()


def test_a_loop_takes_fewer_steps_rather_than_pages_that_another_holds():
    requests = [make_request(name, prompt(6, 70 * i), max_tokens=14) for i, name in enumerate("ab")]
    sim = decoding(*requests, num_pages=5)  # one page of 4 is free, and each has room for one token more
    output = sim.step()
    assert (output.num_rounds, output.preempted_req_ids) == (2, set())
    sim.drain()
    assert [request.output_token_ids for request in requests] == [expected_output(prompt(6, f), 14) for f in (0, 70)]


DRAFTS = Rounds(RowKind.VERIFICATION, most=2, most_tokens=5, plain=Rounds(RowKind.DECODE, most=4))
NO_DRAFTS = {
    "no program": (replace(DRAFTS, holds=lambda rows, pages, lanes: rows < 2), {}, {}),
    "no pages": (DRAFTS, {}, {"num_pages": 4}),
}


@pytest.mark.parametrize("why", NO_DRAFTS)
def test_rows_decode_plainly_where_drafts_cannot_be(why):
    rounds, parameters, limits = NO_DRAFTS[why]
    sim = Simulation(rounds=rounds, tokens_of_round=lambda: 3, **limits)
    firsts = (0, 70)
    requests = [
        sim.add(make_request(name, prompt(6, first), max_tokens=7, **parameters))
        for name, first in zip("ab", firsts, strict=True)
    ]
    sim.step()
    output = sim.step()
    assert output.kinds == [RowKind.DECODE] * 2 and output.num_rounds >= 1
    sim.drain()
    assert [request.output_token_ids for request in requests] == [expected_output(prompt(6, f), 7) for f in firsts]


def test_drafts_run_where_they_can_be():
    sim = Simulation(rounds=DRAFTS, tokens_of_round=lambda: 3)
    sim.add(make_request("a", prompt(6), max_tokens=20))
    assert [sim.step().kinds for _ in range(2)] == [[RowKind.PROMPT_CHUNK], [RowKind.VERIFICATION]]
    sim.drain()


def test_every_page_that_a_request_gets_is_told():
    sim = Simulation(max_decode_steps=8, page_size=2)
    request = sim.add(make_request("a", prompt(5), max_tokens=20))
    told = []
    while not request.is_finished:
        output = sim.launch()
        told += [page for new in output.scheduled_new_reqs for page in new.page_ids]
        told += [page for pages in output.scheduled_cached_reqs.new_page_ids for page in pages]
        assert told == request.pages
        sim.land()
