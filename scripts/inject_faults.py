"""Raise an exception at every line that a step of the engine runs, in every way of decoding, and report the outcomes.

Lines of a recorded run are tried at their first and one more occurrence, with a RuntimeError and a KeyboardInterrupt.
After each fault the requests that ran must have the tokens, text, log probabilities and ends of an undisturbed run, and
so must the same requests again. Prints a row for each way; exits with 1 where anything was not right.

    scripts/inject_faults.py --ways plain eagle3 --lines 200
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.faults.lines import Fault, InjectedError, Line
from tests.faults.trial import Trial, double_fault, faults_of
from tests.faults.ways import WAYS, Way

DOUBLE, TRACED = 50, 20


def try_faults(trial: Trial, faults: list[Fault], what: str) -> tuple[Counter[str], set[Line], Trial]:
    """Outcomes of faults, the lines that were hit, and the trial to use next: a new one after an engine has died."""
    outcomes: Counter[str] = Counter()
    hit: set[Line] = set()
    for fault in tqdm(faults, desc=f"{trial.way.name}, {what}", unit="fault", dynamic_ncols=True):
        outcome = trial.outcome(fault)
        kind = "wrong" if outcome.startswith("wrong") else outcome.partition(":")[0]
        outcomes[kind] += 1
        hit |= {fault.lines[-1]} if fault.num_raised == len(fault.lines) else set()
        if not kind.startswith("right"):
            tqdm.write(f"{fault}: {outcome}")
            trial = Trial(trial.way, beside=trial.beside)
    return outcomes, hit, trial


def every_line(way: Way, *, beside: bool, most: int | None, rng: random.Random, table: Table) -> Counter[str]:
    trial = Trial(way, beside=beside)
    recorded = sorted(trial.record().counts.items(), key=lambda entry: entry[0].place)
    chosen = recorded if most is None or most >= len(recorded) else rng.sample(recorded, most)
    faults = [fault for line, count in chosen for fault in faults_of(line, count, rng)]
    company = "beside others" if beside else "alone"
    outcomes, hit, trial = try_faults(trial, faults, company)
    add_row(table, way.name, company, len(recorded), len(hit), outcomes)
    if beside:
        recovery = list(trial.record_recovery().counts.items())
        doubles = [double_fault(rng.choice(recorded), rng.choice(recovery), rng) for _ in range(DOUBLE)]
        twice, hit, trial = try_faults(trial, doubles, "and in the recovery")
        add_row(table, way.name, "two faults", len(recovery), len(hit), twice)
        outcomes += twice
    return outcomes


def while_traced(way: Way, number: int, rng: random.Random, table: Table) -> Counter[str]:
    """Faults while a new engine's programs are traced."""
    expected = Trial(way, beside=False)
    outcomes: Counter[str] = Counter()
    hit: set[Line] = set()
    for _ in tqdm(range(number), desc=f"{way.name}, traced", unit="fault", dynamic_ncols=True):
        lines = expected.record_traced()
        line, count = rng.choice(sorted(lines.items(), key=lambda entry: entry[0].place))
        fault = Fault(line, rng.randint(1, count), rng.choice([lambda: InjectedError("injected"), KeyboardInterrupt]))
        outcome = expected.with_new_engine().outcome(fault)
        outcomes["wrong" if outcome.startswith("wrong") else outcome.partition(":")[0]] += 1
        hit |= {line} if fault.num_raised else set()
        if not outcome.startswith("right"):
            tqdm.write(f"{line.place}: {outcome}")
    add_row(table, way.name, "traced", number, len(hit), outcomes)
    return outcomes


def add_row(table: Table, way: str, company: str, num_lines: int, num_hit: int, outcomes: Counter[str]) -> None:
    others = sum(count for kind, count in outcomes.items() if not kind.startswith("right"))
    table.add_row(
        way, company, f"{num_hit} of {num_lines}", str(sum(outcomes.values())), str(outcomes["right"]),
        str(outcomes["right (line not reached)"]), str(outcomes["wrong"]), str(outcomes["hang"]),
        str(others - outcomes["wrong"] - outcomes["hang"]),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--lines", type=int, metavar="N", help="lines of each run, chosen at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # thousands of failures that are meant to be
    jax.config.update("jax_disable_most_optimizations", True)
    table = Table("way", "requests", "lines hit", "faults", "right", "not reached", "wrong", "hang", "dead")
    start, outcomes = time.monotonic(), Counter[str]()
    for name in args.ways:
        for beside in (False, True):
            rng = random.Random(f"{args.seed} {name} {beside}")
            outcomes += every_line(WAYS[name], beside=beside, most=args.lines, rng=rng, table=table)
        Console(width=120).print(table)
    each = -(-TRACED // len(args.ways))
    for name in args.ways:
        outcomes += while_traced(WAYS[name], each, random.Random(f"{args.seed} {name}"), table)
    Console(width=120).print(table)
    print(f"{sum(outcomes.values())} faults in {time.monotonic() - start:.0f} s, seed {args.seed}")
    sys.exit(any(not kind.startswith("right") for kind in outcomes))


if __name__ == "__main__":
    main()
