"""A server in a process of its own: its start, what Linux says of it, and its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.http import Address, exchange

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 900.0
_LISTENING = re.compile(r"listening on (http://\S+)")
# Entries of the log that are never right.
_FAULTS = re.compile(r" (ERROR|CRITICAL) |compiled after warm-up|exception was never retrieved|was never awaited")
_MOST_FAULTS, _MOST_FAULT_LINES = 20, 80
_ENTRY = re.compile(r"\d{4}-\d\d-\d\d ")


def environment() -> dict[str, str]:
    """Variables of processes that find the package and the scripts of this checkout."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}


class Log:
    """What a server writes.

    Attributes:
        latest: lines.
        faults: entries that are never right, with the lines that follow them.
    """

    def __init__(self) -> None:
        self.latest, self.faults = deque[str](maxlen=40), list[list[str]]()
        self._is_in_fault = False

    def add(self, line: str) -> None:
        self.latest.append(line)
        if _FAULTS.search(line):
            self.faults.append([])
            self._is_in_fault = True
        elif _ENTRY.match(line):
            self._is_in_fault = False
        if self._is_in_fault and len(self.faults) <= _MOST_FAULTS and len(self.faults[-1]) < _MOST_FAULT_LINES:
            self.faults[-1].append(line)


class ServerProcess:
    """`jaxinfer serve` until `close`.

    Args:
        model: directory of the checkpoint.
        options: of the command line.
        key: that requests must have.

    Attributes:
        log: what it has written.
    """

    def __init__(self, model: Path, options: Sequence[str], key: str) -> None:
        command = [sys.executable, "-m", "jaxinfer", "serve", str(model), "--port", "0", "--api-key", key, *options]
        self.popen = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        self.key, self.log = key, Log()
        self._url: str | None = None
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.log.add(line.rstrip())
            if found := _LISTENING.search(line):
                self._url = found[1]
            if ": ready" in line:
                self._is_ready.set()
        self._is_ready.set()

    def until_ready(self) -> Address:
        """Wait until requests are taken; returns where.

        Raises:
            RuntimeError: the process has ended, or takes too long.
        """
        if not self._is_ready.wait(_START_SECONDS) or self._url is None or self.popen.poll() is not None:
            raise RuntimeError("the server has not started:\n" + "\n".join(self.log.latest))
        return Address.parse(self._url)

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(self._status("VmRSS").split()[0]) * 1024

    @property
    def num_threads(self) -> int:
        return int(self._status("Threads"))

    @property
    def num_files(self) -> int:
        """Open files and sockets."""
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))

    def _status(self, name: str) -> str:
        text = Path(f"/proc/{self.popen.pid}/status").read_text()
        return next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(f"{name}:"))

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def ended(self, seconds: float) -> int | None:
        """The exit code, once the process has ended; None: it has not within so many seconds."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self._reader.join()


class Watch:
    """What operators see of a server.

    Args:
        key: of its requests.
    """

    def __init__(self, address: Address, key: str) -> None:
        self._address, self._headers = address, {"authorization": f"Bearer {key}"}

    async def metrics(self) -> dict[str, float]:
        """Counters and gauges by their names."""
        text = (await self._get("/metrics")).decode()
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#") and "{" not in line]
        return {name: float(value) for name, value in rows}

    async def engine(self) -> dict[str, Any]:
        """What the engine holds."""
        async with exchange(self._address, "GET", "/debug/engine", headers=self._headers) as response:
            return await response.json()

    async def reset_cache(self) -> bool:
        """Forget cached prefixes; returns whether all were."""
        async with exchange(self._address, "POST", "/reset_prefix_cache", headers=self._headers) as response:
            return (await response.json())["success"]

    async def _get(self, path: str) -> bytes:
        async with exchange(self._address, "GET", path, headers=self._headers) as response:
            return await response.body()


def held(found: dict[str, Any]) -> dict[str, Any]:
    """What an engine without requests should not hold, of what `Watch.engine` returns; empty: nothing is left."""
    left = {name: found[name] for name in ("num_held_pages", "num_requests", "num_readers", "num_http_requests")}
    left["taken seats"] = found["num_seats"] - found["num_free_seats"]
    left["fault"] = found["fault"]
    return {name: value for name, value in left.items() if value}


async def until_nothing_is_held(watch: Watch, seconds: float) -> dict[str, Any]:
    """Wait until an engine holds nothing of requests; returns what it still holds after so many seconds."""
    end = time.monotonic() + seconds
    while left := held(await watch.engine()):
        if time.monotonic() > end:
            return left
        await asyncio.sleep(0.05)
    return {}
