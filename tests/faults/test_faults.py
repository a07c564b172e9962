"""Whatever line of a step raises, in every way of decoding, no token changes, nothing hangs and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from jaxinfer.engine.core import EngineCore
from tests.faults.lines import Line, Recording
from tests.faults.trial import Trial, double_fault, faults_of
from tests.faults.ways import WAYS, Way

SEED = 38
LINES_OF_A_WAY, DOUBLE_FAULTS_OF_A_WAY = 24, 6
# Each of their lines is tried, in one of the ways.
ALWAYS = (
    "engine/transactions.py",
    "engine/host_state.py",
    "scheduling/landing.py",
    "engine/launcher.py",
    "engine/notes.py",
)


# Ways that decode with the same engine follow each other in the table: its programs are compiled once.
_last: dict[Callable[[], EngineCore], EngineCore] = {}


def trial_of(way: Way) -> Trial:
    core = _last.pop(way.make, None)
    _last.clear()
    return Trial(way, beside=True, core=core)


def is_always_tried(line: Line) -> bool:
    return line.place.startswith(ALWAYS) or "Runner.launch" in line.place or "_recover" in line.place


@pytest.mark.parametrize("way", WAYS)
def test_no_line_that_raises_changes_a_token(way):
    """Neither in a step nor in the recovery from it."""
    trial, rng = trial_of(WAYS[way]), random.Random(f"{SEED} {way}")
    lines = by_place(trial.record())
    turn = list(WAYS).index(way)
    own = [entry for number, entry in enumerate(filter(lambda entry: is_always_tried(entry[0]), lines))
           if number % len(WAYS) == turn]  # fmt: skip
    chosen = [*own, *rng.sample(lines, LINES_OF_A_WAY)]
    faults = [faults_of(line, count, rng)[0] for line, count in chosen]
    recovery = by_place(trial.record_recovery())
    faults += [double_fault(rng.choice(lines), rng.choice(recovery), rng) for _ in range(DOUBLE_FAULTS_OF_A_WAY)]
    wrong = [f"{fault}: {outcome}" for fault in faults if not (outcome := trial.outcome(fault)).startswith("right")]
    assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)
    _last[WAYS[way].make] = trial.close()


def by_place(recording: Recording) -> list[tuple[Line, int]]:
    return sorted(recording.counts.items(), key=lambda entry: entry[0].place)
