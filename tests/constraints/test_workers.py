"""Threads of constraints: what fails, fails one piece of work, and the threads continue."""

import threading
import time
from types import SimpleNamespace

import pytest

from jaxinfer.constraints import workers as workers_module
from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.workers import Workers


def fails():
    raise ValueError("of the work")


def test_pieces_run_in_their_order_and_what_one_raises_is_its_own():
    workers, seen = Workers(count=1), []
    futures = [workers.submit(lambda number=number: seen.append(number) or number) for number in range(5)]
    failing, after = workers.submit(fails), workers.submit(lambda: 7)
    assert [future.result() for future in futures] == seen == [0, 1, 2, 3, 4]
    assert after.result() == 7 and isinstance(failing.exception(), ValueError)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit])
def test_an_error_beside_the_work_fails_its_piece_and_the_thread_continues(error, monkeypatch):
    workers, left = Workers(count=1), [error("beside the work")]

    def monotonic():
        if threading.current_thread().name == "constraints" and left:
            raise left.pop()
        return time.monotonic()

    monkeypatch.setattr(workers_module, "time", SimpleNamespace(monotonic=monotonic))
    failing, after = workers.submit(lambda: 1), workers.submit(lambda: 2)
    assert after.result(timeout=9) == 2
    assert isinstance(failing.exception(timeout=9), error)


def test_a_piece_that_takes_too_long_fails_and_another_thread_takes_the_next_up_to_a_limit():
    workers, event = Workers(count=1, patience=0.05, most_replaced=1), threading.Event()
    with pytest.raises(ConstraintError, match="more than 0.05 seconds"):
        workers.run(event.wait)
    assert workers.run(lambda: 3) == 3
    stuck = workers.submit(event.wait)
    for _ in range(2):  # queued after the last thread, and when there is none
        with pytest.raises(ConstraintError, match="no grammar is followed any more: 2 pieces"):
            workers.run(lambda: None)
    assert isinstance(stuck.exception(), ConstraintError)
    event.set()
    for _ in range(900):  # the threads that were given up end: there is room for others
        try:
            assert workers.run(lambda: 4) == 4
            break
        except ConstraintError:
            time.sleep(0.01)
    else:
        raise AssertionError("no thread took their place")


def test_slow_pieces_in_all_threads_hold_no_others_up(monkeypatch):
    monkeypatch.setattr(workers_module, "_SLOW_SECONDS", 0.05)
    monkeypatch.setattr(workers_module, "_LOOK_SECONDS", 0.05)
    workers, event = Workers(count=2, most_replaced=2), threading.Event()
    slow = [workers.submit(event.wait) for _ in range(3)]
    assert workers.run(lambda: 3) == 3
    assert not any(future.done() for future in slow)
    event.set()
    assert all(future.result(timeout=9) for future in slow)
    for _ in range(900):  # the threads that were added leave
        if len(workers._workers) == 2:
            break
        time.sleep(0.01)
    assert len(workers._workers) == 2 and workers.run(lambda: 4) == 4
