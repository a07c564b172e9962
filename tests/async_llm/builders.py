"""What tests of `AsyncLLM` share: limits, prompts, and waiting for an engine that has nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from jaxinfer import AsyncLLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "kv_cache_tokens": 4096}
TEXTS = ["the sea", "a list of numbers", "rain", "how bread is made"]
QUESTION = "How do I make a small garden?"


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 300))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about within 30 seconds")


async def is_idle(engine: AsyncLLM) -> None:
    """Wait until nothing runs, and see that nothing is kept of what did."""
    core, thread = engine._client.core, engine._thread
    await until(lambda: not core.has_unfinished_requests() and not thread._jobs)
    assert not await engine.call(lambda: thread._readers or thread._jobs or thread._names or engine._client.has_readers)
    await engine.call(core.check_integrity)


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int], str | None]:
    parts = [output.outputs[0] for output in outputs]
    return "".join(p.text for p in parts), [t for p in parts for t in p.token_ids], parts[-1].finish_reason


async def collect(outputs: Any) -> list[RequestOutput]:
    return [output async for output in outputs]
