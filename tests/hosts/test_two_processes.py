"""Two processes on loopback that share the embedded model: the tokens of one process, and an end by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.processes import free_port

DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative_config": {"method": "ngram"}},
    "draft model": {"speculative_config": {"method": "draft_model"}},
    "eagle3": {"speculative_config": {"method": "eagle3"}},
}
_SECONDS = 600


def start(address: str, count: int, process_id: int, name: str, options: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(2 // count)}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.process", address, str(count), str(process_id), name, json.dumps(options)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


class Pair:
    """Two processes. Their lines of JSON are read as they come."""

    def __init__(self, name: str, options: dict[str, Any], others: dict[str, Any] | None = None) -> None:
        address = f"127.0.0.1:{free_port()}"
        each = [options, options if others is None else others]
        self.processes = [start(address, 2, number, name, each[number]) for number in range(2)]

    def line(self) -> dict[str, Any]:
        """Return the next line of the first process. What comes after it is left to `ends`."""
        assert self.processes[0].stdout is not None
        # A buffer would keep the lines that have come with this one: communicate() reads the pipe itself.
        with open(self.processes[0].stdout.fileno(), "rb", buffering=0, closefd=False) as output:
            while not (line := output.readline()).startswith(b"{"):  # JAX prints too
                assert line, "the process has ended"
        return json.loads(line)

    def ends(self) -> list[tuple[int, str, str]]:
        """Return the exit code, output and log of each, once both have ended."""
        found = []
        for process in self.processes:
            output, log = process.communicate(timeout=_SECONDS)
            found.append((process.returncode, output, log))
        return found

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def pair() -> Iterator[Any]:
    pairs: list[Pair] = []

    def begin(*arguments: Any) -> Pair:
        pairs.append(Pair(*arguments))
        return pairs[-1]

    yield begin
    for each in pairs:
        each.kill()


def lines(output: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


@pytest.mark.parametrize(
    ("drafter", "scenario"),
    [
        ("draft model", "mixed"),
        pytest.param("draft model", "warm", marks=pytest.mark.slow),
        *[pytest.param(drafter, "thousand", marks=pytest.mark.slow) for drafter in DRAFTERS],
    ],
)
def test_two_processes_give_the_tokens_of_one(pair, drafter, scenario):
    together = pair(scenario, DRAFTERS[drafter])
    (code, output, log), (code_of_other, output_of_other, log_of_other) = together.ends()
    assert code == 0, log
    assert code_of_other == 0 and lines(output_of_other) == {"followed": True}, log_of_other
    alone = start("", 1, 0, scenario, DRAFTERS[drafter])
    output_alone, log_alone = alone.communicate(timeout=_SECONDS)
    assert alone.returncode == 0, log_alone
    found, wanted = lines(output), lines(output_alone)
    assert found["tokens"] == wanted["tokens"]
    assert found["recoveries"] >= 1
    if drafter in ("plain", "draft model"):  # the others may find that nothing of these requests is worth drafting
        assert (found["accepted"] > 0) == (drafter != "plain")
    assert found.get("compiles", 0) == 0


def test_what_the_others_cannot_do_is_refused_by_name(pair):
    (code, output, log), _ = pair("refused", {}).ends()
    assert code == 0, log
    assert lines(output)["refused"] == [
        f"{what} is not possible while several processes share the model"
        for what in ("sleep", "a digest of the weights", "an update of the weights")
    ]


def test_a_process_with_another_engine_is_refused_by_name(pair):
    (code, _, log), (other_code, _, _) = pair("mixed", {}, {"seed": 1}).ends()
    assert code != 0 and other_code != 0
    assert "process 1 has another engine than process 0" in log


def test_the_engine_ends_by_name_when_another_process_is_killed(pair):
    together = pair("lost", {})
    assert together.line() == {"begins": True}
    together.processes[1].kill()
    begin = time.monotonic()
    assert together.line()["lost"].startswith("process 1 is lost")
    assert time.monotonic() - begin < 60
    [(code, output, _), _] = together.ends()
    assert code == 0 and lines(output)["again"].startswith("process 1 is lost")
    assert time.monotonic() - begin < 120


def test_the_others_end_when_the_first_process_is_killed(pair):
    together = pair("lost", {})
    assert together.line() == {"begins": True}
    together.processes[0].kill()
    begin = time.monotonic()
    _, (code, _, log) = together.ends()
    assert time.monotonic() - begin < 120
    # JAX may be the first to notice that its coordinator is gone.
    assert code != 0 and ("LostProcessError: process 0 is lost" in log or "another task died" in log)
