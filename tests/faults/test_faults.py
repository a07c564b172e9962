"""Whatever line of a step raises, in every way of decoding, no token changes, nothing hangs and nothing is lost."""

from __future__ import annotations

import random

import pytest

from tests.faults.lines import Fault, InjectedError, Line
from tests.faults.trial import Trial, faults_of
from tests.faults.ways import WAYS

pytestmark = pytest.mark.unoptimized

SEED = 38
LINES_OF_A_WAY = 24
# Each of their lines is tried, in one of the ways.
ALWAYS = (
    "engine/transactions.py",
    "engine/host_state.py",
    "engine/landing.py",
    "engine/launcher.py",
    "engine/notes.py",
)


def is_always_tried(line: Line) -> bool:
    return line.place.startswith(ALWAYS) or "Runner.launch" in line.place or "_recover" in line.place


@pytest.mark.parametrize("way", WAYS)
def test_no_line_that_raises_changes_a_token(way):
    trial, rng = Trial(WAYS[way], beside=True), random.Random(f"{SEED} {way}")
    lines = sorted(trial.record().counts.items(), key=lambda entry: entry[0].place)
    turn = list(WAYS).index(way)
    own = [entry for number, entry in enumerate(filter(lambda entry: is_always_tried(entry[0]), lines))
           if number % len(WAYS) == turn]  # fmt: skip
    chosen = [*own, *rng.sample(lines, LINES_OF_A_WAY)]
    wrong = []
    for line, count in chosen:
        for fault in faults_of(line, count, rng)[:1]:
            outcome = trial.outcome(fault)
            if outcome != "right":
                wrong.append(f"{line.place}: {outcome}")
    assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("way", ["plain", "bidirectional"])
def test_a_recovery_may_be_interrupted_too(way):
    trial, rng = Trial(WAYS[way], beside=True), random.Random(SEED)
    lines = sorted(trial.record().counts.items(), key=lambda entry: entry[0].place)
    recovery = sorted(trial.record_recovery().counts.items(), key=lambda entry: entry[0].place)
    wrong = []
    for line, count in rng.sample(recovery, 20):
        first, occurrences = rng.choice(lines)
        error = KeyboardInterrupt if rng.random() < 0.5 else lambda: InjectedError("injected")
        then = (line, rng.randint(1, count), lambda: KeyboardInterrupt())
        outcome = trial.outcome(Fault(first, rng.randint(1, occurrences), error, then))
        if not outcome.startswith("right"):
            wrong.append(f"{first.place}, then {line.place}: {outcome}")
    assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)
