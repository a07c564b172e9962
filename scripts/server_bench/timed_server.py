"""`jaxinfer serve` that tells how long outputs take from their landing to the socket: on SIGUSR1, a line of JSON."""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from typing import Any

from jaxinfer.cli.main import main
from jaxinfer.frontend.mailbox import Mailbox
from jaxinfer.server.events import EventStream

_seconds: list[float] = []


def time_outputs() -> None:
    put, take, write = Mailbox.put, Mailbox.take, EventStream._write

    def timed_put(self: Any, output: Any) -> None:
        self.landed = getattr(self, "landed", None) or time.perf_counter()
        put(self, output)

    latest: list[float | None] = [None]

    def timed_take(self: Any) -> Any:
        found = take(self)
        if found is not None:
            # The same task goes on to the socket without another one between.
            latest[0], self.landed = self.landed, None
        return found

    async def timed_write(self: Any, send: Any) -> None:
        async def timed_send(message: Any) -> None:
            landed, latest[0] = latest[0], None
            await send(message)
            if landed is not None:
                _seconds.append(time.perf_counter() - landed)

        await write(self, timed_send)

    Mailbox.put, Mailbox.take, EventStream._write = timed_put, timed_take, timed_write

    def tell(number: int, frame: Any) -> None:
        given, _seconds[:] = sorted(_seconds), []
        found = {"count": len(given), "median_ms": 1e3 * statistics.median(given or [0.0])}
        print("LANDING " + json.dumps(found), flush=True)

    signal.signal(signal.SIGUSR1, tell)


if __name__ == "__main__":
    time_outputs()
    sys.exit(main(["serve", *sys.argv[1:]]))
