"""Driver of benchmarks over HTTP: sends requests as they arrive to a server of OpenAI's API, and reads the answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.bench.http import Address, Response, exchange
from jaxinfer.bench.served import Reading

# By endpoint: its path, and where a streamed choice has text.
PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_TEXTS = ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")


@dataclass(frozen=True)
class Target:
    """The server that is measured, and one of its endpoints.

    Attributes:
        address: with the path that the API begins with, such as /v1.
        endpoint: "chat" or "completions".
        timeout: seconds after which a request has failed.
    """

    address: Address
    endpoint: str
    api_key: str | None = None
    timeout: float = 600.0
    headers: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        object.__setattr__(self, "headers", key)

    async def first_model(self) -> str:
        """Return the name of the first served model.

        Raises:
            RuntimeError: the server does not say.
        """
        try:
            async with exchange(self.address, "GET", "/models", headers=self.headers) as response:
                if response.status == 200:
                    return str((await response.json())["data"][0]["id"])
                reason = _reason(response.status, await response.body())
        except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"the server does not name its models, give --model NAME: {reason}")


async def run_served(
    target: Target,
    bodies: Sequence[Mapping[str, Any]],
    *,
    arrivals: Sequence[float] | None = None,
    concurrency: int | None = None,
    done: Callable[[Reading], object] = lambda reading: None,
) -> tuple[list[Reading], float]:
    """Send all requests and read their answers to the end.

    Args:
        bodies: what is sent, of each request.
        arrivals: seconds after the start, ascending, at which each request arrives; None: all arrive at the start.
        concurrency: send a request only while fewer than this many are unfinished; None: no limit. A request that was
            held back arrives when it is sent, unless `arrivals` gives its time.
        done: called at the end of each request.

    Returns:
        The readings in the order of the bodies, and the seconds of the run.

    Raises:
        ValueError: an argument is out of range.
    """
    if arrivals is not None and len(arrivals) != len(bodies):
        raise ValueError(f"{len(arrivals)} arrivals for {len(bodies)} requests")
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    seats = asyncio.Semaphore(len(bodies) if concurrency is None else concurrency)
    start = time.perf_counter()

    async def send(number: int) -> Reading:
        reading = Reading(start if arrivals is None else start + arrivals[number])
        await asyncio.sleep(reading.begin - time.perf_counter())
        async with seats:
            if arrivals is None:
                reading.begin = time.perf_counter()
            try:
                async with asyncio.timeout(target.timeout):
                    await _ask(target, bodies[number], reading)
            except TimeoutError:
                reading.error = f"no answer within {target.timeout:g} seconds"
            except (OSError, EOFError, ValueError) as error:
                reading.error = f"{type(error).__name__}: {error}"
            reading.end = time.perf_counter()
        done(reading)
        return reading

    readings = await asyncio.gather(*map(send, range(len(bodies))))
    return readings, time.perf_counter() - start


async def _ask(target: Target, body: Mapping[str, Any], reading: Reading) -> None:
    """Send a request and note what comes of it.

    Raises:
        OSError, EOFError, ValueError: the exchange was none of HTTP, or its content none of OpenAI's API.
    """
    path = PATHS[target.endpoint]
    async with exchange(target.address, "POST", path, body, target.headers) as response:
        if response.status != 200:
            reading.error = _reason(response.status, await response.body())
            return
        usage = None
        try:
            if body.get("stream"):
                usage = await _read_stream(response, reading)
            else:
                usage = (await response.json()).get("usage")
            if reading.error is None and usage is None:
                reading.error = "the answer has no usage"
            if usage is not None:
                reading.prompt_tokens, reading.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                reading.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"not an answer of OpenAI's API: {error!r}") from error


async def _read_stream(response: Response, reading: Reading) -> dict[str, Any] | None:
    """Note the pieces of a stream; returns its usage, None where it has none."""
    usage = None
    async for event in response.events():
        now = time.perf_counter()
        if event == "[DONE]":
            return usage
        chunk = json.loads(event)
        if chunk.get("error"):
            reading.error = f"an error in the stream: {_message(chunk)}"
            return usage
        usage = chunk.get("usage") or usage
        if any(_has_text(choice) for choice in chunk.get("choices") or ()):
            reading.times.append(now)
            if chunk.get("usage"):
                reading.counts.append(chunk["usage"]["completion_tokens"])
    reading.error = "the stream has ended without [DONE]"
    return usage


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("text")) if delta is None else any(delta.get(name) for name in _TEXTS)


def _reason(status: int, body: bytes) -> str:
    message = body[:200].decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError):
        message = _message(json.loads(body))
    return f"status {status}: {message}"[:200]


def _message(found: Mapping[str, Any]) -> str:
    error = found.get("error")
    return str(error.get("message") if isinstance(error, Mapping) else error)[:160]
