"""Launches of requests whose draws all have masks."""

from __future__ import annotations

import pytest

from jaxinfer.scheduling import refusals as refusals_module
from tests.builders import make_request, model_config, random_model, run_requests
from tests.constraints.late_workers import LateWorkers
from tests.constraints.toys import automata
from tests.speculative.builders import engine_of


@pytest.mark.parametrize("way", ["loops", "trees"])
def test_rows_that_need_the_host_after_each_token_are_launched_together(way, monkeypatch):
    monkeypatch.setattr(refusals_module, "FREQUENT", -1.0)
    monkeypatch.setattr(refusals_module, "SELDOM", -1.0)
    loose = automata(101, 100)[0]
    made = [
        make_request(f"row {seed}", [seed, 2, 3], max_tokens=24, constraint=loose, temperature=0.9, seed=seed)
        for seed in range(4)
    ]
    core = engine_of(way, random_model(model_config()))
    launched: list[int] = []
    left_out: list[str] = []

    def listen(output):
        launched.append(len(output.requests))
        if not all(request.draws_alone for request in output.requests):
            return
        for request in set(made).difference(output.requests):
            if request.draws_alone and not request.is_finished and not request.num_walking:
                left_out.append(request.request_id)

    core.launch_listeners.append(listen)
    monkeypatch.setattr(core.launcher._walkers, "_workers", LateWorkers())
    run_requests(core, made)
    core.launch_listeners.remove(listen)
    assert {1, 4} <= set(launched), launched  # some were late, and met the others
    assert not left_out
