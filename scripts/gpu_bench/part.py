"""One part of `bench_gpu.py` in this process: for every case a line of JSON on stdout, as soon as it is measured."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from gpu_bench.budget import NO_GPU
from gpu_bench.plan import Case, NotRun, Part, parts

# What a first case of its effort may take when others went before.
UNKNOWN_S = 15.0

Measure = Callable[[Case], dict[str, Any]]


def main() -> int:
    args = parse_arguments()
    deadline = time.monotonic() + args.seconds
    part = next(part for part in parts(smoke=args.smoke) if part.name == args.part)
    # Whatever a library prints must not stand between the results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import jax

    from jaxinfer.compile_cache import enable_compile_cache

    if not args.smoke and jax.default_backend() != "gpu":
        print(f"no GPU: JAX runs on {jax.default_backend()} here; --smoke tries everything on it", file=sys.stderr)
        return NO_GPU
    enable_compile_cache()
    if part.name == "card":
        from gpu_bench.card import describe_machine

        emit(results, {"case": "environment"} | describe_machine())
    run_cases(part.cases, measure_for(part, smoke=args.smoke, work=args.work), results, deadline=deadline)
    return 0


def run_cases(
    cases: tuple[Case, ...],
    measure: Measure,
    results: IO[str],
    *,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure the cases in order; one that fails is a row with its error, and the next one is tried.

    Args:
        deadline: of `clock`; a case is not begun when it would go beyond. What it may take is what the last one of its
            effort took, at least half of the longest: the first one may have loaded what the others find in place.
    """
    taken: dict[str, list[float]] = {}
    for case in cases:
        begin = clock()
        effort = case.get("effort", "")
        known = taken.setdefault(effort, [])
        unknown = UNKNOWN_S if any(taken.values()) else 0.0
        expected = max(known[-1], max(known) / 2) if known else unknown
        if begin + expected >= deadline:
            left = max(0.0, deadline - begin)
            emit(results, case | {"not_run": f"{left:.0f} s were left, and it may take {expected:.0f} s"})
            continue
        try:
            row = case | measure(case)
        except NotRun as reason:
            row = case | {"not_run": str(reason)}
        except Exception as error:  # whatever it is, it goes into the row and costs no other case
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            row = case | {"error": f"{type(error).__name__}: {lines[0]}"[:300]}
        emit(results, row)
        gc.collect()
        known.append(clock() - begin)


def emit(results: IO[str], row: dict[str, Any]) -> None:
    """One row, at once."""
    print(json.dumps(row), file=results, flush=True)


def measure_for(part: Part, *, smoke: bool, work: Path) -> Measure:
    """The function that measures a case of this part."""
    from functools import partial

    if part.name == "card":
        from gpu_bench.card import measure_card

        return measure_card
    if part.name in ("check", "branches", "attention"):
        from gpu_bench.attention import check_kernel, measure_attention

        return partial(check_kernel if part.name == "check" else measure_attention, smoke=smoke)
    from gpu_bench.steps import Steps

    return Steps(part.cases, smoke=smoke, work=work).measure


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[part.name for part in parts(smoke=True)])
    parser.add_argument("--seconds", type=float, required=True, metavar="N", help="until the process is stopped")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for files that parts leave each other")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
