"""Measurements of a server, from what its clients saw. Importing this module loads no JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jaxinfer.bench.summary import RunFigures, Summary


@dataclass
class Reading:
    """What a client saw of one request.

    Attributes:
        begin, end: when the request arrived, and when its answer had ended, in seconds of one clock.
        times: when pieces of a streamed answer came.
        counts: tokens of the answer so far at each of these times; empty: the server does not say.
        prompt_tokens, cached_tokens, output_tokens: as the answer's usage has them.
        error: why the request has failed; None: it has not.
    """

    begin: float
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class ServedMeasurement(RunFigures):
    """Figures of one run against a server. Latencies are in seconds; failed requests are counted apart.

    Attributes:
        cached_tokens: tokens of prompts that the server had cached.
        num_failed: failed requests.
        errors: how often each error came.
        time_to_first_token: from a request's arrival to the first piece of its streamed answer.
        time_per_output_token: for each streamed answer, the time from its first piece to its last one over its tokens
            after the first.
        inter_token_latency: for each token after the first piece, the time since the piece before over the tokens of
            its own piece; None where the server does not say how many tokens a piece has.
        time_between_pieces: between pieces of an answer, each of any number of tokens.
        latency: from a request's arrival to the end of its answer.
    """

    cached_tokens: int
    num_failed: int
    errors: dict[str, int]
    time_to_first_token: Summary | None
    time_per_output_token: Summary | None
    inter_token_latency: Summary | None
    time_between_pieces: Summary | None
    latency: Summary | None

    @classmethod
    def of(cls, readings: Sequence[Reading], seconds: float) -> ServedMeasurement:
        """Summarise readings of a run that took so many seconds."""
        done = [reading for reading in readings if reading.error is None]
        streams = [reading for reading in done if reading.times]
        gaps = [after - before for reading in streams for before, after in pairwise(reading.times)]
        return cls(
            num_requests=len(done),
            prompt_tokens=sum(reading.prompt_tokens for reading in done),
            output_tokens=sum(reading.output_tokens for reading in done),
            seconds=seconds,
            cached_tokens=sum(reading.cached_tokens for reading in done),
            num_failed=len(readings) - len(done),
            errors=dict(Counter(reading.error for reading in readings if reading.error is not None)),
            time_to_first_token=Summary.of([reading.times[0] - reading.begin for reading in streams]),
            time_per_output_token=Summary.of(
                [
                    (reading.times[-1] - reading.times[0]) / (reading.output_tokens - 1)
                    for reading in streams
                    if len(reading.times) > 1 and reading.output_tokens > 1
                ]
            ),
            inter_token_latency=_by_token(streams),
            time_between_pieces=Summary.of(gaps),
            latency=Summary.of([reading.end - reading.begin for reading in done]),
        )


def _by_token(streams: Sequence[Reading]) -> Summary | None:
    latencies: list[float] = []
    tokens: list[int] = []
    for reading in streams:
        before: tuple[float, int] | None = None
        for time, count in zip(reading.times, reading.counts, strict=False):
            if before is not None and count > before[1]:
                latencies.append((time - before[0]) / (count - before[1]))
                tokens.append(count - before[1])
            if before is None or count > before[1]:
                before = time, count
    return Summary.of(latencies, tokens)
