"""Two servers of one core each, with half the KV pool each, against one server of both cores, through vLLM's router.

Whole answers of the embedded checkpoint, by turns, in tokens a second; the servers that are not asked are idle. `make
test-router` makes the router's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxinfer.bench.environment import describe_environment
from server_bench.processes import Process, by_turns, open_server, rate, reset_cache
from server_bench.workload import ENGINE

ROUTER = Path(__file__).resolve().parents[1] / ".venv-router" / "bin" / "vllm-router"
_START_SECONDS = 60.0


def start_router(port: int, policy: str, servers: list[int]) -> subprocess.Popen[bytes]:
    """vLLM's router before these servers, ready."""
    command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--worker-urls"]
    command += [f"http://127.0.0.1:{server}" for server in servers]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).read()
            return process
        if time.monotonic() > deadline:
            process.kill()
            raise RuntimeError("the router has not become ready")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--policy", default="round_robin")
    parser.add_argument("--router-port", type=int, default=18700, help="and the one after it")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "bench_replicas.json")
    args = parser.parse_args()
    half = ENGINE["kv_cache_tokens"] // 2
    one = open_server("0,1")
    two = [open_server(core, kv_cache_tokens=half) for core in ("0", "1")]
    servers = [one, *two]
    router = start_router(args.router_port, args.policy, [port for _, port in two])
    clients = {port: Process("server_bench.client", str(port)) for port in (one[1], args.router_port)}

    def asked(port: int, running: list[tuple[Process, int]]) -> dict[str, Any]:
        for _, number in running:
            reset_cache(number)
        return clients[port].ask("whole", args.requests, args.tokens, 0)

    try:
        pairs = by_turns(args.turns, lambda: asked(args.router_port, two), lambda: asked(one[1], [one]))
        again = by_turns(args.turns, lambda: asked(one[1], [one]), lambda: asked(one[1], [one]))
    finally:
        router.kill()
        for process in clients.values():
            process.close()
        for process, _ in servers:
            process.close()
    table, rows = Table("", "ratio", "spread"), []
    for name, found in (("two servers / one", pairs), ("one / itself", again)):
        ratios = [rate(first) / rate(second) for first, second in found]
        rows.append({"name": name, "ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]})
        table.add_row(name, f"{rows[-1]['ratio']:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}")
    report = {"environment": describe_environment(), "cores": os.cpu_count(), "policy": args.policy, "rows": rows}
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
