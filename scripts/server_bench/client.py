"""A client on raw sockets: for each line of stdin, "KIND COUNT TOKENS BAD", a line with what it saw.

BAD is the number of bad requests a second beside the others. The client's own CPU seconds are reported, as it runs on
the same cores.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from server_bench.workload import messages, params

_PATH = "/v1/chat/completions"


def encoded(port: int, body: Any) -> bytes:
    text = json.dumps(body).encode() if not isinstance(body, bytes) else body
    head = f"POST {_PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text


async def ask(port: int, body: dict[str, Any], gaps: list[float]) -> int:
    """Send a request and read its answer; returns its tokens, and adds the seconds between its pieces to `gaps`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encoded(port, body))
    received, last = bytearray(), 0.0
    while piece := await reader.read(1 << 16):
        now = time.perf_counter()
        if b"data: " in piece or last:
            if last:
                gaps.append(now - last)
            last = now
        received += piece
    writer.close()
    assert received.startswith(b"HTTP/1.1 200"), received[:300]
    place = received.rfind(b'"completion_tokens":')
    return int(received[place + 20 : received.index(b",", place)])


async def annoy(port: int, rate: int) -> None:
    """Send bad requests, so many a second."""
    bad = [b"{", b'{"messages": 1}', b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}']
    number, begin = 0, time.perf_counter()
    while True:
        await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(encoded(port, bad[number % len(bad)]))
        assert (await reader.read(1 << 16)).startswith(b"HTTP/1.1 400")
        writer.close()
        number += 1


async def run(port: int, kind: str, count: int, tokens: int, bad: int) -> dict[str, Any]:
    gaps: list[float] = []
    more = {"stream": True, "stream_options": {"include_usage": True}} if kind == "stream" else {}
    bodies = [{"messages": messages(number), **params(number, tokens), **more} for number in range(count)]
    annoying = asyncio.create_task(annoy(port, bad)) if bad else None
    begin, cpu = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*[ask(port, body, gaps) for body in bodies])
    seconds = time.perf_counter() - begin
    if annoying is not None:
        if annoying.done():
            annoying.result()
        annoying.cancel()
    gaps.sort()
    return {
        "seconds": seconds, "tokens": sum(counts), "client_cpu": time.process_time() - cpu,
        "gap_p99": gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0,
    }  # fmt: skip


def main() -> None:
    port = int(sys.argv[1])
    for line in sys.stdin:
        kind, *numbers = line.split()
        print(json.dumps(asyncio.run(run(port, kind, *map(int, numbers)))), flush=True)


if __name__ == "__main__":
    main()
