"""What the scheduler puts into a step: budget, order, chunks and admission."""

import pytest

from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.scheduling.rounds import RowKind
from tests.builders import make_request
from tests.engine.fake_device import Simulation, expected_output


def prompt(length: int) -> list[int]:
    return list(range(length))


def scheduled(output) -> dict[str, int]:
    """Request id -> tokens of the step."""
    assert sum(output.num_tokens) == output.total_num_scheduled_tokens
    return dict(zip([request.request_id for request in output.requests], output.num_tokens, strict=True))


def test_a_step_without_requests_is_empty():
    output = Simulation().step()
    assert scheduled(output) == {}
    assert (output.scheduled_new_reqs, output.finished_req_ids, output.preempted_req_ids) == ([], set(), set())


def test_a_prompt_that_fits_is_computed_in_one_step_and_then_decoded_token_by_token():
    sim = Simulation(budget=32)
    request = sim.add(make_request("a", prompt(20), max_tokens=3))
    assert [scheduled(sim.step()) for _ in range(3)] == [{"a": 20}, {"a": 1}, {"a": 1}]
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert request.output_token_ids == expected_output(prompt(20), 3)


def test_prompts_share_a_step_up_to_its_budget():
    sim = Simulation(budget=32)
    for name in "abc":
        sim.add(make_request(name, prompt(15)))
    assert scheduled(sim.step()) == {"a": 15, "b": 15, "c": 2}


def test_a_prompt_beyond_the_budget_is_computed_in_chunks_and_gets_its_token_after_the_last():
    sim = Simulation(budget=32)
    request = sim.add(make_request("a", prompt(70), max_tokens=1))
    assert scheduled(sim.step()) == {"a": 32} and request.output_token_ids == []
    assert scheduled(sim.step()) == {"a": 32} and request.output_token_ids == []
    assert scheduled(sim.step()) == {"a": 6}
    assert request.output_token_ids == expected_output(prompt(70), 1)


def test_running_requests_go_before_waiting_ones():
    sim = Simulation(budget=16)
    sim.add(make_request("old", prompt(4)))
    sim.step()
    sim.add(make_request("new", prompt(100)))
    assert scheduled(sim.step()) == {"old": 1, "new": 15}


def test_decodes_go_on_in_every_step_while_a_long_prompt_is_computed():
    sim = Simulation(budget=16)
    for name in "abc":
        sim.add(make_request(name, prompt(2), max_tokens=20))
    sim.step()
    sim.add(make_request("long", prompt(100)))
    for _ in range(7):
        step = scheduled(sim.step())
        assert {name: step[name] for name in "abc"} == {"a": 1, "b": 1, "c": 1}


def test_no_more_requests_run_than_there_are_rows():
    sim = Simulation(rows=2)
    for name in "abc":
        sim.add(make_request(name, prompt(3), max_tokens=2))
    assert set(scheduled(sim.step())) == {"a", "b"}
    assert set(scheduled(sim.step())) == {"a", "b"}
    assert set(scheduled(sim.step())) == {"c"}


def test_no_more_rows_than_allowed_carry_more_than_one_token():
    sim = Simulation(prefill_room=lambda decodes, prefills: 32 if prefills <= 2 else 0)
    for name in "abc":
        sim.add(make_request(name, prompt(3)))
    assert scheduled(sim.step()) == {"a": 3, "b": 3}
    assert scheduled(sim.step()) == {"a": 1, "b": 1, "c": 3}


def test_a_prompt_of_one_token_decodes_at_once():
    sim = Simulation(prefill_room=lambda decodes, prefills: 32 if prefills <= 1 else 0)
    sim.add(make_request("a", prompt(3)))
    single = sim.add(make_request("b", prompt(1)))
    output = sim.step()
    assert (scheduled(output), output.enters) == ({"a": 3, "b": 1}, {"b"})
    assert output.kinds == [RowKind.PROMPT_CHUNK, RowKind.DECODE]
    sim.drain()
    assert single.output_token_ids == expected_output(prompt(1), 8)


def test_the_last_token_of_a_cut_prompt_decodes_at_once():
    sim = Simulation(budget=8, max_decode_steps=4)
    cut = sim.add(make_request("a", prompt(17), max_tokens=9))
    outputs = [sim.step() for _ in range(3)]
    assert [(scheduled(output), output.enters) for output in outputs] == [
        ({"a": 8}, set()), ({"a": 8}, set()), ({"a": 1}, {"a"}),
    ]  # fmt: skip
    assert (outputs[2].kinds, outputs[2].rounds_of) == ([RowKind.DECODE], [4])
    sim.drain()
    assert cut.output_token_ids == expected_output(prompt(17), 9)


def test_prefills_leave_the_room_that_decodes_are_computed_in():
    sim = Simulation(budget=16, prefill_room=lambda decodes, prefills: 16 - 4 * decodes)
    for name in "ab":
        sim.add(make_request(name, prompt(2), max_tokens=20))
    sim.step()
    sim.add(make_request("long", prompt(19)))
    assert scheduled(sim.step()) == {"a": 1, "b": 1, "long": 8}
    assert scheduled(sim.step()) == {"a": 1, "b": 1, "long": 8}
    assert scheduled(sim.step()) == {"a": 1, "b": 1, "long": 3}


def test_a_decode_behind_a_prefill_waits_if_the_step_cannot_hold_both():
    room = {(0, 1): 12, (0, 2): 16}
    sim = Simulation(budget=16, rows=2, prefill_room=lambda decodes, prefills: room.get((decodes, prefills), 8))
    sim.add(make_request("first", prompt(29), max_tokens=2))
    sim.add(make_request("other", prompt(2), max_tokens=9))
    steps = [scheduled(sim.step()) for _ in range(3)]
    assert steps == [{"first": 12, "other": 2}, {"first": 12}, {"first": 5, "other": 1}]


def test_a_waiting_request_stays_out_until_there_are_pages_for_its_tokens():
    sim = Simulation(num_pages=5, page_size=4)
    sim.add(make_request("a", prompt(12), max_tokens=2))
    sim.add(make_request("b", prompt(12), max_tokens=2))
    assert scheduled(sim.step()) == {"a": 12}
    assert scheduled(sim.step()) == {"a": 1}
    assert scheduled(sim.step()) == {"b": 12}
    assert sim.scheduler.num_preemptions == 0


def test_a_small_request_does_not_overtake_one_that_waits_for_pages():
    sim = Simulation(num_pages=5, page_size=4)
    sim.add(make_request("running", prompt(8), max_tokens=3))
    sim.add(make_request("large", prompt(15), max_tokens=1))
    sim.add(make_request("small", prompt(1), max_tokens=1))
    assert set(scheduled(sim.step())) == {"running"}
    assert set(scheduled(sim.step())) == {"running"}


def test_requests_enter_in_the_order_of_arrival():
    sim = Simulation(rows=1)
    for name in ("z", "a", "m"):
        sim.add(make_request(name, prompt(2), max_tokens=1))
    assert [list(scheduled(sim.step())) for _ in range(3)] == [["z"], ["a"], ["m"]]


def test_a_request_that_could_never_fit_is_refused_and_the_others_go_on():
    sim = Simulation(num_pages=4, page_size=4)
    other = sim.add(make_request("fits", prompt(12), max_tokens=4))
    with pytest.raises(ValueError, match="'large' may grow to 17 tokens, the KV pool holds 16"):
        sim.add(make_request("large", prompt(13), max_tokens=4))
    sim.drain()
    assert other.output_token_ids == expected_output(prompt(12), 4)


def test_an_id_that_is_in_use_is_refused():
    sim = Simulation()
    sim.add(make_request("a", prompt(3)))
    with pytest.raises(ValueError, match="'a' is in use"):
        sim.add(make_request("a", prompt(5)))
    sim.drain()


def test_an_id_can_be_used_again_when_its_request_is_finished():
    sim = Simulation()
    sim.add(make_request("a", prompt(3), max_tokens=2))
    sim.drain()
    again = sim.add(make_request("a", prompt(7), max_tokens=2))
    sim.drain()
    assert again.output_token_ids == expected_output(prompt(7), 2)


def test_a_first_schedule_says_everything_about_a_request():
    sim = Simulation(page_size=4)
    request = make_request("a", prompt(6))
    sim.add(request)
    output = sim.step()
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.num_computed_tokens) == ("a", prompt(6), 0)
    assert new.sampling_params is request.sampling_params
    assert new.page_ids == request.pages and len(new.page_ids) == 2
    assert output.scheduled_cached_reqs.req_ids == []
    assert output.num_scheduled_tokens == {"a": 6}


def test_later_schedules_say_only_what_changed():
    sim = Simulation(page_size=4)
    request = sim.add(make_request("a", prompt(7)))
    sim.step()
    pages = list(request.pages)
    within_the_page, on_a_new_page = (sim.step().scheduled_cached_reqs for _ in range(2))
    assert (within_the_page.req_ids, within_the_page.new_page_ids) == (["a"], [[]])
    assert (within_the_page.num_computed_tokens, within_the_page.num_output_tokens) == ([7], [1])
    assert on_a_new_page.new_page_ids == [request.pages[len(pages) :]] and len(request.pages) == 3
    assert within_the_page.resumed_req_ids == on_a_new_page.resumed_req_ids == set()


def test_a_finished_request_is_reported_in_the_next_step_and_only_there():
    sim = Simulation()
    sim.add(make_request("a", prompt(3), max_tokens=1))
    sim.add(make_request("b", prompt(3), max_tokens=3))
    assert [sim.step().finished_req_ids for _ in range(3)] == [set(), {"a"}, set()]


def test_a_token_that_ends_the_sequence_ends_the_request_at_once():
    sim = Simulation()
    first, second = expected_output(prompt(5), 2)
    request = sim.add(make_request("a", prompt(5), max_tokens=50, eos_token_ids=[second]))
    assert sim.drain() == 2
    assert request.output_token_ids == [first, second]
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_a_finished_request_gives_all_its_pages_back():
    sim = Simulation(num_pages=16)
    sim.add(make_request("a", prompt(30), max_tokens=9))
    sim.drain()
    assert sim.scheduler.kv.allocator.num_free == 16
