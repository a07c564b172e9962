"""Whatever line of scheduler, KV manager, cache or recovery raises, requests get their tokens and pages stay right."""

from __future__ import annotations

import contextlib
from collections import defaultdict

import pytest

from jaxinfer.scheduling.rounds import Rounds, RowKind
from tests.faults.fake_engine import FakeEngine, items, tokens_of
from tests.faults.lines import Fault, InjectedError, Recording

STRATEGIES = {
    "steps": Rounds(RowKind.DECODE),
    "loops": Rounds(RowKind.DECODE, most=4),
}
NUM_PAGES = 12
MOST_STEPS = 300


def run(rounds: Rounds, around: Fault | Recording | None = None) -> tuple[dict, dict]:
    """What each request got, and what landings told of each."""
    engine, arriving = FakeEngine(rounds, NUM_PAGES), items()
    told: dict[str, list[int]] = defaultdict(list)
    for step in range(MOST_STEPS):
        for item in arriving.get(step, ()):
            engine.add(item)
        if step > max(arriving) and not engine.transactions.is_pending:
            break
        with around if around is not None and around.is_armed else contextlib.nullcontext():
            try:
                landings = engine.transactions.step()
            except (InjectedError, KeyboardInterrupt):
                continue
        for request, first, last in landings:
            told[request.request_id] += request.token_ids[first:last]
    else:
        raise AssertionError("unfinished after far too many steps")
    engine.sim.scheduler.check_integrity()
    assert engine.sim.scheduler.kv.allocator.num_held == 0
    return tokens_of(arriving), told


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_line_may_raise_at_every_moment(name, request):
    rounds = STRATEGIES[name]
    expected, told = run(rounds)
    assert told == {key: tokens for key, (tokens, _) in expected.items()}
    with_lines = Recording()
    run(rounds, with_lines)
    every = 1 if request.config.getoption("--slow") else 150  # every occurrence takes many minutes
    number, wrong = 0, []
    for line, count in sorted(with_lines.counts.items(), key=lambda entry: entry[0].place):
        for occurrence in range(1, count + 1):
            number += 1
            if number % every and occurrence > 1:
                continue
            error = KeyboardInterrupt if number % 2 else lambda: InjectedError("injected")
            fault = Fault(line, occurrence, error)
            try:
                found, told = run(rounds, fault)
            except Exception as failure:
                wrong.append(f"{line.place} at its occurrence {occurrence}: {failure!r}")
                continue
            if found != expected or told != {key: tokens for key, (tokens, _) in expected.items()}:
                wrong.append(f"{line.place} at its occurrence {occurrence}: {found} {told}")
    assert not wrong, "\n".join(wrong)
    assert number > 10_000
