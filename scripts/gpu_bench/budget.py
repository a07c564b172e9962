"""Run the parts of `bench_gpu.py` in processes of their own, each within a time limit. Imports no JAX.

A part's process prints one JSON object a line for every case that it has finished. Whatever becomes of the process, the
rows that it printed count, and every case that it did not finish is a row that says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpu_bench.plan import Part

Row = dict[str, Any]
# Exit status of a part's process that finds no GPU: none of the others will find one.
NO_GPU = 3
# After its time is over, a process is given this long to be gone.
_PATIENCE_S = 10.0
_GLANCE_S = 0.2
_SHOWN_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """What became of one part: "done", "failed" (a crash, or a case with an error), "stopped" or "not run"."""

    status: str
    rows: list[Row]
    seconds: float = 0.0
    returncode: int | None = None
    message: str = ""


def allot(part: Part, later: Sequence[Part], remaining_s: float) -> float:
    """Seconds for `part` when `later` ones wait; 0: too little is left to start it.

    A part gets what it may take as long as each later one keeps its least; an earlier part's least goes first.
    """
    spare = remaining_s - sum(other.least_s for other in later)
    seconds = min(part.most_s, max(part.least_s, spare))
    return seconds if seconds <= remaining_s else 0.0


def run_parts(
    parts: Sequence[Part],
    command: Callable[[Part, float], list[str]],
    *,
    seconds: float,
    log: IO[str],
    environment: dict[str, str],
    on_row: Callable[[Row], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Part, Outcome]]:
    """Run parts in order within `seconds` in all; what became of each, as soon as it is known.

    Args:
        command: the command line of a part's process that has so many seconds.
        log: gets what the processes write to stderr.
        on_row: called with every row as soon as it is there, those that say why a case has no figures included.
    """
    end = clock() + seconds
    for index, part in enumerate(parts):
        allotted = allot(part, parts[index + 1 :], end - clock())
        if allotted <= 0:
            reason = f"not started: {max(0.0, end - clock()):.0f} s were left, it needs {part.least_s:.0f} s"
            outcome = Outcome("not run", unfinished(part, [], {"not_run": reason}), message=reason)
            for row in outcome.rows:
                on_row(row)
        else:
            outcome = run_part(part, command(part, allotted), allotted, log=log, environment=environment, on_row=on_row)
        yield part, outcome


def run_part(
    part: Part,
    command: list[str],
    seconds: float,
    *,
    log: IO[str],
    environment: dict[str, str],
    on_row: Callable[[Row], None],
) -> Outcome:
    """One part's process, stopped after `seconds` with everything that it has started."""
    print(f"\n===== {part.name}, at most {seconds:.0f} s =====", file=log, flush=True)
    at = Path(log.name).stat().st_size
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    rows: list[Row] = []
    strays: list[str] = []
    try:
        in_time = _read_rows(process, part, begin + seconds, rows, strays, on_row)
    finally:
        _end(process)
    took = time.monotonic() - begin
    for line in strays:
        print(line, file=log, flush=True)
    if not in_time:
        status, why = "stopped", {"not_run": f"the part was stopped after {took:.0f} s"}
    elif process.returncode == 0:
        status, why = "done", {"error": "the process ended without a word about this case"}
    else:
        last = _last_line(log, at)
        status, why = "failed", {"error": f"the process ended with status {process.returncode}: {last}"}
    missing = unfinished(part, rows, why)
    for row in missing:
        on_row(row)
    rows += missing
    if status == "done" and any("error" in row for row in rows):
        status = "failed"
    message = next((value for row in rows for key, value in row.items() if key in ("error", "not_run")), "")
    return Outcome(status, rows, took, process.returncode, "" if status == "done" else message)


def unfinished(part: Part, rows: Sequence[Row], why: Row) -> list[Row]:
    """A row with `why` for every case of `part` that has none in `rows`."""
    known = {row["case"] for row in rows}
    return [{"part": part.name} | case | why for case in part.cases if case["case"] not in known]


def _read_rows(
    process: subprocess.Popen[str], part: Part, deadline: float, rows: list[Row], strays: list[str],
    on_row: Callable[[Row], None],
) -> bool:  # fmt: skip
    """Collect rows until the process has ended; whether that was before the deadline."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    stream = process.stdout

    def pump() -> None:
        for line in stream:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    ended = False
    while True:
        try:
            line = lines.get(timeout=min(_GLANCE_S, max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            # Once the process is gone, another process that holds its stdout is not waited for.
            if ended:
                return True
            if time.monotonic() >= deadline:
                return False
            ended = _has_ended(process)
            continue
        if line is None:
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or "case" not in row:
            strays.append(line)
            continue
        row = {"part": part.name} | row
        rows.append(row)
        on_row(row)
    # A closed stdout does not mean that the process is gone; one that is about to go gets a moment.
    deadline = max(deadline, time.monotonic() + 1.0)
    while not _has_ended(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _has_ended(process: subprocess.Popen[str]) -> bool:
    """Whether the process is over; it keeps its number until `_end` has used it."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and what it has started: they share a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE_S)


def _last_line(log: IO[str], start: int) -> str:
    """The last line that says something in what was logged from `start` on."""
    lines = [line.strip() for line in Path(log.name).read_bytes()[start:].decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")


def tail(file: Path, lines: int = _SHOWN_LINES) -> str:
    """The last lines of a text file."""
    return "\n".join(file.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
