"""The server against the engine alone, by turns on one machine: the embedded checkpoint, a client on raw sockets.

`stream`: so many streams at once, in tokens a second, against as many streams of an `LLM`. `whole`: whole answers
against `LLM.generate`. `landing`: from the landing of tokens to their socket. `bad`: the longest gaps between pieces
(99th percentile) with 100 bad requests a second, against the same without.

The client is a process of its own, whose CPU seconds are reported: it shares the cores with the server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxinfer.bench.environment import describe_environment
from server_bench.processes import Process, by_turns, cpu_seconds, open_server, rate, reset_cache

_BAD_PER_SECOND = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "bench_server.json")
    args = parser.parse_args()
    server, port = open_server()
    offline, client = Process("server_bench.offline"), Process("server_bench.client", str(port))
    assert offline.line().strip() == "ready"
    table = Table("kind", "requests", "ratio", "spread", "client's CPU share", "landing to socket, ms")
    rows: list[dict[str, Any]] = []

    def asked(kind: str, count: int, bad: int = 0) -> dict[str, Any]:
        reset_cache(port)
        before = cpu_seconds(server)
        found = client.ask(kind, count, args.tokens, bad)
        return found | {"server_cpu": cpu_seconds(server) - before}

    def landing() -> float:
        os.kill(server.popen.pid, signal.SIGUSR1)
        line = server.line()
        while not line.startswith("LANDING "):
            line = server.line()
        return json.loads(line.removeprefix("LANDING "))["median_ms"]

    def note(kind: str, count: int, ratios: list[float], results: list[dict[str, Any]], median_ms: float) -> None:
        cpu = statistics.median(result["client_cpu"] / result["seconds"] for result in results)
        found = {"kind": kind, "requests": count, "ratio": statistics.median(ratios), "client_cpu_share": cpu}
        rows.append(found | {"spread": [min(ratios), max(ratios)], "landing_ms": median_ms})
        print(json.dumps(rows[-1]), flush=True)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        table.add_row(kind, str(count), f"{rows[-1]['ratio']:.2f}", spread, f"{cpu:.2f}", f"{median_ms:.2f}")

    try:
        for kind in ("stream", "whole"):
            for count in args.streams if kind == "stream" else args.streams[-1:]:
                landing()
                served, alone = partial(asked, kind, count), partial(offline.ask, kind, count, args.tokens)
                pairs = by_turns(args.turns, served, alone)
                assert all(one["tokens"] == two["tokens"] for one, two in pairs)
                note(kind, count, [rate(one) / rate(two) for one, two in pairs], [one for one, _ in pairs], landing())
        most = args.streams[-1]
        pairs = by_turns(args.turns, lambda: asked("stream", most, _BAD_PER_SECOND), lambda: asked("stream", most))
        gaps = [one["gap_p99"] / two["gap_p99"] for one, two in pairs]
        note("bad", most, gaps, [one for one, _ in pairs], landing())
    finally:
        for process in (client, offline, server):
            process.close()
    args.output.write_text(json.dumps({"environment": describe_environment(), "rows": rows}, indent=2) + "\n")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
