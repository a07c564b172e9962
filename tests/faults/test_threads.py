"""A second thread that steps an engine is told so, and the step of the first one ends as if nothing had happened."""

from __future__ import annotations

import threading

import pytest

from jaxinfer.engine.transactions import Transactions


def test_a_second_thread_is_refused_and_recovers_nothing():
    begun, may_end, recoveries = threading.Event(), threading.Event(), []

    def advance() -> None:
        begun.set()
        assert may_end.wait(30)

    def blame(error: Exception) -> None:
        raise error

    transactions = Transactions(advance, blame, lambda: recoveries.append(1))
    first = threading.Thread(target=transactions.step, name="first")
    first.start()
    assert begun.wait(30)
    with pytest.raises(RuntimeError, match="thread 'first' runs this engine: several threads can share an AsyncLLM"):
        transactions.step()
    with pytest.raises(RuntimeError, match="thread 'first'"):
        transactions.between_steps(lambda: None)
    may_end.set()
    first.join()
    assert not recoveries and not transactions.runs
    transactions.step()
    assert not recoveries
