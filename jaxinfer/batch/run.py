"""A run over a file of requests: several at once, answers in the order of the lines."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jaxinfer.batch.lines import Line, count_lines, lines_of
from jaxinfer.batch.output import Output
from jaxinfer.batch.stable import stable, with_seed

# Answers that wait for that of an earlier line, in multiples of those that are asked at once.
_AHEAD = 4
_UNAVAILABLE = 503

type Ask = Callable[[str, dict[str, Any], str], Awaitable[tuple[int, dict[str, Any]]]]


@dataclass
class Counts:
    """Lines of a file, and what has become of them."""

    total: int = 0
    before: int = 0  # answered by an earlier run
    done: int = 0  # answered by this one
    failed: int = 0  # of these, with an error

    def take(self, answer: Mapping[str, Any]) -> None:
        """Count an answer that was written."""
        self.done += 1
        self.failed += answer["error"] is not None


async def run(
    source: str | os.PathLike[str],
    output: Output,
    ask: Ask,
    *,
    concurrency: int,
    progress: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Ask every line of a file that is not answered yet.

    Args:
        ask: (url, body, request id) -> status and answer.
        concurrency: most lines that are asked at once.
        progress: called after every answer.

    Raises:
        ValueError: the output has the answers of another file.
        RuntimeError: the engine has failed; the lines before are answered.
    """
    counts = Counts(count_lines(source), output.check(lines_of(source)))
    progress(counts)
    time = int(Path(source).stat().st_mtime)
    room = asyncio.Semaphore(concurrency)
    waiting: deque[asyncio.Task[dict[str, Any]]] = deque()

    async def answered(line: Line) -> dict[str, Any]:
        async with room:
            return await answer_line(line, ask, time)

    async def write_first() -> None:
        answer = await waiting[0]
        waiting.popleft()
        output.append(answer)
        counts.take(answer)
        progress(counts)

    try:
        for line in islice(lines_of(source), counts.before, None):
            waiting.append(asyncio.create_task(answered(line)))
            while len(waiting) >= _AHEAD * concurrency or (waiting and waiting[0].done()):
                await write_first()
            await asyncio.sleep(0)
        while waiting:
            await write_first()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return counts


async def answer_line(line: Line, ask: Ask, time: int) -> dict[str, Any]:
    """Return the answer to a line, as OpenAI's batches have it.

    Args:
        time: when it was answered, in seconds since 1970.

    Raises:
        RuntimeError: the engine has failed.
    """
    name = f"batch_req_{line.number}"
    if line.error is not None:
        error = {"code": "invalid_line", "message": f"line {line.number}: {line.error}"}
        return {"id": name, "custom_id": line.custom_id, "response": None, "error": error}
    status, body = await ask(line.url, with_seed(line), name)
    if status == _UNAVAILABLE:  # the engine is dead: the line is answered by the next run
        raise RuntimeError(f"line {line.number}: {body.get('error', body)}")
    response = {"status_code": status, "request_id": name, "body": stable(body, line, time)}
    error = None
    if status != 200:
        error = {"code": str(body["error"].get("code") or "invalid_request"), "message": body["error"]["message"]}
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
