"""The processes of a measurement: servers and clients, and turns between them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server_bench.workload import ENGINE

SCRIPTS = Path(__file__).resolve().parents[1]


class Process:
    """A process that answers lines with lines of JSON.

    Args:
        cores: those that it may use, as `taskset` names them; empty: all.
    """

    def __init__(self, module: str, *arguments: str, cores: str = "") -> None:
        environment = {**os.environ, "PYTHONPATH": f"{SCRIPTS.parent}:{SCRIPTS}"}
        bound = ["taskset", "-c", cores] if cores else []
        self.popen = subprocess.Popen(
            [*bound, sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if module.endswith("server") else subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def line(self) -> str:
        assert self.popen.stdout is not None
        found = self.popen.stdout.readline()
        assert found, "the process has ended"
        return found

    def ask(self, *words: Any) -> dict[str, Any]:
        assert self.popen.stdin is not None
        self.popen.stdin.write(" ".join(map(str, words)) + "\n")
        self.popen.stdin.flush()
        return json.loads(self.line())

    def close(self) -> None:
        self.popen.terminate()
        self.popen.wait()


def open_server(cores: str = "", **changes: Any) -> tuple[Process, int]:
    """A server that is warm, and its port.

    Args:
        changes: of the engine's arguments.
    """
    engine = {**ENGINE, **changes}
    options = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    process = Process("server_bench.timed_server", "--port", "0", "--warm-up", "full", *options, cores=cores)
    assert process.popen.stderr is not None
    for line in process.popen.stderr:
        found = re.search(r"listening on http://\S+:(\d+)", line)
        if found:
            port = int(found[1])
        if ": ready" in line:
            return process, port
    raise RuntimeError("the server has not become ready")


def cpu_seconds(process: Process) -> float:
    """CPU seconds of a process so far."""
    user, system = Path(f"/proc/{process.popen.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def reset_cache(port: int) -> None:
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/reset_prefix_cache", method="POST")).read()


def by_turns(count: int, first: Callable[[], dict[str, Any]], second: Callable[[], dict[str, Any]]) -> list[Any]:
    """Pairs of results; the first pair is not counted."""
    return [(first(), second()) for _ in range(count + 1)][1:]


def rate(result: dict[str, Any]) -> float:
    return result["tokens"] / result["seconds"]
