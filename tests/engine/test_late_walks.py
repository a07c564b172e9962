"""Rows whose walks end while later launches have drawn further tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from jaxinfer.constraints.workers import Workers
from jaxinfer.scheduling import refusals as refusals_module
from tests.builders import make_engine, make_request, model_config, random_model
from tests.constraints.oracle import constrained_output
from tests.constraints.toys import RandomAutomaton

VOCAB, EOS = 101, 100


class HeldWorkers(Workers):
    """Works when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit_all(self, works: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
        futures: list[Future[Any]] = [Future() for _ in works]
        self._held += zip(futures, works, strict=True)
        return futures

    def release(self) -> None:
        held, self._held = self._held, []
        for future, work in held:
            future.set_result(work())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_rows_that_a_walk_makes_void_do_not_count(overlap, logprobs, monkeypatch):
    model = random_model(model_config())
    runs = RandomAutomaton(VOCAB, [EOS], share=0.6, forces=0.6, ends=0, seed=4)
    made = [
        make_request(
            f"{count}", [count, 2, 3], max_tokens=count, constraint=runs, temperature=0.5, seed=count, logprobs=logprobs
        )
        for count in range(20, 28)
    ]
    # They are launched again while their walks are late, as they do not need the host after each token.
    monkeypatch.setattr(refusals_module, "FREQUENT", 2.0)
    monkeypatch.setattr(refusals_module, "SELDOM", 2.0)
    core, workers = make_engine(model, overlap=overlap), HeldWorkers()
    monkeypatch.setattr(core.launcher._walkers, "_workers", workers)
    for request in made:
        core.add_request(request)
    before, met = 0, False
    while core.has_unfinished_requests():
        core.step()
        walking = core.launcher.num_walking
        if walking == before:  # nothing more is launched before these
            workers.release()
        met |= any(request.num_walking > 1 for request in made)
        before = walking
    assert met
    for request in made:
        assert (request.output_token_ids, request.status.value) == constrained_output(model, request)
