"""Counts of what an engine holds."""

from jaxinfer.frontend.inspection import inspect_engine
from tests.builders import make_request


def test_an_idle_engine_holds_nothing(idle_engine):
    found = inspect_engine(idle_engine(), num_readers=0)
    assert found.fault is None and found.num_held_pages == found.num_requests == 0
    assert (found.num_free_pages, found.num_free_seats) == (found.num_pages, found.num_seats)


def test_a_running_request_holds_pages_and_a_seat(idle_engine):
    core = idle_engine()
    core.add_request(make_request("0", [1, 2, 3], max_tokens=20))
    core.step()
    found = inspect_engine(core, num_readers=1)
    assert (found.num_requests, found.num_readers) == (1, 1) and found.num_held_pages >= 1
    assert found.num_free_seats == found.num_seats - 1
    core.abort("0")
    while core.has_unfinished_requests():
        core.step()
    found = inspect_engine(core, num_readers=0)
    assert found.num_held_pages == found.num_requests == 0 and found.num_free_seats == found.num_seats


def test_a_leaked_page_is_a_fault(idle_engine):
    core = idle_engine()
    allocator = core.scheduler.kv.allocator
    leaked = allocator.allocate(1)
    found = inspect_engine(core, num_readers=0)
    allocator.free(leaked)
    assert found.fault == "1 pages held, requests know 0" and found.num_held_pages == 1
