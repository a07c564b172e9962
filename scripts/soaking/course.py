"""A whole soak: the model, expected answers, the server, its load, and what was found."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soaking.asked import Request
from soaking.client import Setting
from soaking.load import Findings, soak
from soaking.model import model_with_tools
from soaking.requests import distinct_requests
from soaking.server import ROOT, ServerProcess, environment
from soaking.tally import Tally

KEY = "soak"
# The engine of both sides: small enough that requests wait, are preempted and evict each other's prefixes.
ENGINE: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_tokens": 1536}
_MOST_WAITING = 16
_MOST_STORED = 128  # so few that the oldest make room


@dataclass(frozen=True)
class Course:
    """What a soak is told.

    Attributes:
        model: directory of a checkpoint; None: the embedded one, with tools.
        speculative_config: of the engine; empty: none.
        engine: arguments of `LLM`, which are options of the server too.
        seconds, num_requests: the most of load; None: any number of requests.
        num_clients: clients at a time.
        num_distinct: distinct requests.
        warm_up_seconds: after so many of load, memory should not grow any more.
        options: further words for `jaxinfer serve`.
    """

    model: Path | None = None
    speculative_config: dict[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=lambda: dict(ENGINE))
    seconds: float = 60.0
    num_requests: int | None = None
    num_clients: int = 12
    num_distinct: int = 200
    warm_up_seconds: float = 60.0
    seed: int = 0
    options: Sequence[str] = ()


def run_course(
    course: Course,
    say: Callable[[str], object] = lambda words: None,
    show: Callable[[int], object] = lambda count: None,
) -> tuple[Findings, Tally]:
    """Run a soak.

    Args:
        say: called with what happens now.
        show: called with the number of requests so far.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = course.model or model_with_tools(Path(folder))
        requests = distinct_requests(course.num_distinct, course.seed)
        say(f"answering {len(requests)} requests without HTTP")
        expected = expected_answers(Path(folder), model, course, requests)
        say("starting the server")
        options = ["--warm-up", "full", "--debug-endpoints", "--max-waiting-requests", str(_MOST_WAITING)]
        options += ["--max-stored-responses", str(_MOST_STORED)]
        for name, value in _engine(course).items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            options += [f"--{name.replace('_', '-')}", text]
        server = ServerProcess(model, [*options, *course.options], KEY)
        try:
            address = server.until_ready()
            say("load")
            num_places = course.engine["max_num_seqs"] + _MOST_WAITING
            setting = Setting(address, KEY, requests, expected, num_places, Tally())
            findings = asyncio.run(
                soak(
                    server, setting, seconds=course.seconds, num_requests=course.num_requests,
                    num_clients=course.num_clients, warm_up_seconds=course.warm_up_seconds, seed=course.seed, show=show,
                )
            )  # fmt: skip
        finally:
            server.close()
    return findings, setting.tally


def _engine(course: Course) -> dict[str, Any]:
    """Arguments of `LLM`, which are options of the server too."""
    more = {"speculative_config": course.speculative_config} if course.speculative_config else {}
    return {**course.engine, **more}


def expected_answers(folder: Path, model: Path, course: Course, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Answer requests in a process of their own, by an engine of the same settings.

    Raises:
        subprocess.CalledProcessError: one of them cannot be answered.
    """
    asked, answers = folder / "asked.json", folder / "answers.json"
    given = {"engine": {"model": str(model), **_engine(course)}, "requests": [each.asked.offline for each in requests]}
    asked.write_text(json.dumps(given))
    command = [sys.executable, "-m", "soaking.offline", str(asked), str(answers)]
    subprocess.run(command, cwd=ROOT / "scripts", env=environment(), check=True)
    return json.loads(answers.read_text())
