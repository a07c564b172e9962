"""The load of a soak, the quiet after it, and the server's end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from soaking.choices import BrokenAnswerError
from soaking.client import Client, Setting
from soaking.manners import MANNERS
from soaking.server import ServerProcess, Watch, until_nothing_is_held
from soaking.tally import Tally

_REQUEST_SECONDS = 300.0  # none takes so long
_QUIET_SECONDS = 10.0
_SAMPLE_SECONDS = 1.0
MOST_GROWTH = 0.05
# Threads that start when they are first needed, and stay: those of the event loop's pool, one of which has loaded the
# model, and two that follow grammars.
MOST_LATE_THREADS = min(32, (os.cpu_count() or 1) + 4) - 1 + 2
_NUM_LAST_STREAMS = 4


@dataclass
class Sample:
    """The server's process at one time.

    Attributes:
        seconds: since the load began.
    """

    seconds: float
    rss_bytes: int
    num_threads: int
    num_files: int
    num_running: int
    num_waiting: int


@dataclass
class Findings:
    """What a soak has found beside the outcomes of requests.

    Attributes:
        seconds: how long the load lasted.
        held: what the engine held of requests after the load; it should be nothing.
        is_cache_empty: whether every page was free after a reset of the cache.
        compiles: after warm-up.
        num_unjudged: requests whose tool calls are written such that only their tokens are compared, if they have any.
        files_when_ready, threads_when_ready: open files and threads of the process before the first request.
        files_at_end, threads_at_end: after the load.
        rss_after_warm_up, rss_at_end: bytes, medians of samples after the warm-up of the load and of the last ones.
        exit_code: after SIGTERM; None: the process had to be killed.
        faults: entries of the log that are never right.
        problems: everything that should not be, in words.
    """

    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    held: dict[str, Any] = field(default_factory=dict)
    is_cache_empty: bool = False
    compiles: int = 0
    num_unjudged: int = 0
    files_when_ready: int = 0
    threads_when_ready: int = 0
    files_at_end: int = 0
    threads_at_end: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    rss_after_warm_up: int = 0
    rss_at_end: int = 0
    exit_code: int | None = None
    faults: list[list[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        return self.rss_at_end / self.rss_after_warm_up - 1 if self.rss_after_warm_up else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"growth": self.growth}


async def soak(
    server: ServerProcess,
    setting: Setting,
    *,
    seconds: float,
    num_requests: int | None,
    num_clients: int,
    warm_up_seconds: float,
    seed: int,
    show: Callable[[int], object] = lambda count: None,
) -> Findings:
    """Load a server, let it become quiet, and end it by SIGTERM while streams run.

    Args:
        seconds: most seconds of load.
        num_requests: most requests; None: as many as come.
        num_clients: clients at a time.
        warm_up_seconds: after so many of load, memory should not grow any more.
        show: called with the number of requests, often.
    """
    findings, watch = Findings(), Watch(setting.address, setting.key)
    findings.num_unjudged = num_unjudged(setting)
    findings.files_when_ready, findings.threads_when_ready = server.num_files, server.num_threads
    begin = time.monotonic()
    sampling = asyncio.create_task(_sample(server, watch, findings, begin))

    def is_over() -> bool:
        show(setting.tally.num_requests)
        is_enough = num_requests is not None and setting.tally.num_requests >= num_requests
        return is_enough or time.monotonic() - begin >= seconds or server.popen.poll() is not None or sampling.done()

    await asyncio.gather(*[_live(Client(setting, random.Random(f"{seed} {n}")), is_over) for n in range(num_clients)])
    findings.seconds = time.monotonic() - begin
    if sampling.done():
        sampling.result()
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    if server.popen.poll() is None:
        await _look_at_quiet_server(server, watch, findings)
        judge_memory(findings, warm_up_seconds)
        await _end(server, setting, findings)
    findings.faults = server.log.faults
    note_problems(findings, setting.tally)
    return findings


async def _live(client: Client, is_over: Callable[[], bool]) -> None:
    """Let a client behave in one manner after the other."""
    while not is_over():
        (manner,) = client.rng.choices(MANNERS, [each.weight for each in MANNERS])
        client.manner = manner.name
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await manner.run(client)
        except TimeoutError:
            client.fail(f"nothing within {_REQUEST_SECONDS:g} seconds")
        except BrokenAnswerError as error:
            client.fail(str(error), code=error.code)
        except (OSError, EOFError, ValueError, LookupError) as error:
            client.fail(f"{type(error).__name__}: {error}")


async def _sample(server: ServerProcess, watch: Watch, findings: Findings, begin: float) -> None:
    while True:
        metrics = await watch.metrics()
        findings.samples.append(
            Sample(
                round(time.monotonic() - begin, 2), server.rss_bytes, server.num_threads, server.num_files,
                int(metrics["jaxinfer:num_requests_running"]), int(metrics["jaxinfer:num_requests_waiting"]),
            )
        )  # fmt: skip
        await asyncio.sleep(_SAMPLE_SECONDS)


def num_unjudged(setting: Setting) -> int:
    """Requests whose tool calls are not known although they are answered."""
    return sum(part.get("calls", ()) is None for each in setting.expected for part in each.values())


async def _look_at_quiet_server(server: ServerProcess, watch: Watch, findings: Findings) -> None:
    findings.held = await until_nothing_is_held(watch, _QUIET_SECONDS)
    findings.metrics = await watch.metrics()
    findings.compiles = int(findings.metrics["jaxinfer:num_compiles_after_warm_up_total"])
    is_reset = await watch.reset_cache()
    findings.engine = await watch.engine()
    findings.files_at_end = await _files_after_close(server, findings.files_when_ready)
    findings.threads_at_end = server.num_threads
    findings.is_cache_empty = is_reset and findings.engine["num_free_pages"] == findings.engine["num_pages"]


async def _files_after_close(server: ServerProcess, wanted: int) -> int:
    """Open files, once there are no more than `wanted`, or after a while: clients close first."""
    end = time.monotonic() + _QUIET_SECONDS
    while server.num_files > wanted and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return server.num_files


def judge_memory(findings: Findings, warm_up_seconds: float) -> None:
    """Compare memory after the warm-up of the load with the last of it, over a tenth of the time each."""
    width = max(2.0, (findings.seconds - warm_up_seconds) / 10)
    ends = {"rss_after_warm_up": warm_up_seconds + width, "rss_at_end": findings.seconds}
    for name, end in ends.items():
        found = [sample.rss_bytes for sample in findings.samples if end - width <= sample.seconds <= end]
        setattr(findings, name, int(statistics.median(found)) if found else 0)


async def _end(server: ServerProcess, setting: Setting, findings: Findings) -> None:
    """End a server by SIGTERM while streams run: they end whole, and others are refused."""
    client = Client(setting, random.Random(0))
    client.manner = "stream when it ends"
    streams = [request for request in setting.requests if request.asked.may_stream and not request.asked.then]
    longest = sorted(streams, key=lambda request: request.asked.offline["params"]["max_tokens"])[-_NUM_LAST_STREAMS:]
    async with asyncio.TaskGroup() as group, client.connection() as kept:
        begun = [asyncio.Event() for _ in longest]
        for request, event in zip(longest, begun, strict=True):
            group.create_task(_last_stream(client, request, event))
        await kept.send(client.http("GET", "/health", None, {"connection": "keep-alive"}))
        await (await kept.response()).body()
        for event in begun:
            await event.wait()
        server.signal(signal.SIGTERM)
        await _ask_until_refused(client, findings)
    findings.exit_code = await asyncio.to_thread(server.ended, 60.0)


async def _last_stream(client: Client, request: Any, begun: asyncio.Event) -> None:
    async with client.connection() as connection:
        try:
            await connection.send(client.encoded(request, stream=True))
            response = await connection.response()
            begun.set()
            await client.finish(request, response)
        except (OSError, EOFError, ValueError, LookupError) as error:
            client.fail(f"{type(error).__name__}: {error}", request=request.number)
        finally:
            begun.set()


async def _ask_until_refused(client: Client, findings: Findings) -> None:
    """Ask new things of a server that ends: from some moment on it says 503, or takes no connection any more."""
    end = time.monotonic() + 30
    request = client.pick("conversation")
    while time.monotonic() < end:
        try:
            async with client.connection() as connection:
                await connection.send(client.encoded(request))
                response = await connection.response()
                if response.status == 503 and response.headers.get("retry-after"):
                    return
                await response.body()
        except (OSError, EOFError):
            return
    findings.problems.append("new requests are still taken 30 seconds after SIGTERM")


def note_problems(findings: Findings, tally: Tally) -> None:
    """Write down in words what should not be."""
    most_threads = findings.threads_when_ready + MOST_LATE_THREADS
    checks = {
        f"{tally.num_failed} outcomes were not allowed": tally.num_failed > 0,
        f"responses with status 500: {tally.statuses[500]}": tally.statuses[500] > 0,
        f"the engine still holds {findings.held}": bool(findings.held),
        "pages are not free after a reset of the cache": not findings.is_cache_empty,
        f"{findings.compiles} compiles after warm-up": findings.compiles > 0,
        f"{findings.files_at_end} files are open after the load, {findings.files_when_ready} were before it": (
            findings.files_at_end > findings.files_when_ready
        ),
        f"{findings.threads_at_end} threads run after the load, {findings.threads_when_ready} did before it": (
            findings.threads_at_end > most_threads
        ),
        "memory was not measured": not (findings.rss_after_warm_up and findings.rss_at_end),
        f"memory has grown by {findings.growth:.1%} after warm-up": findings.growth > MOST_GROWTH,
        f"the exit code is {findings.exit_code}": findings.exit_code != 0,
        f"the log has {len(findings.faults)} errors, the first: {findings.faults[:1]}": bool(findings.faults),
    }
    findings.problems += [words for words, is_so in checks.items() if is_so]
