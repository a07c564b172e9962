"""Whether an event loop runs while threads work beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def turns_beside[T](work: Callable[[], T]) -> tuple[T, int]:
    """The result of work in a thread, and how often the event loop ran meanwhile: work that stops other threads until
    its end leaves it a few turns."""

    async def run() -> tuple[T, int]:
        turns, task = 0, asyncio.create_task(asyncio.to_thread(work))
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        return await task, turns

    return asyncio.run(run())
