"""Benchmark driver: runs a workload all at once, with limited concurrency, or with Poisson arrivals."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxinfer.bench.measurement import Measurement, recording
from jaxinfer.bench.workload import WorkItem
from jaxinfer.frontend.progress import GenerationProgress
from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams


def run_workload(
    llm: LLM,
    items: Sequence[WorkItem],
    params: Sequence[SamplingParams],
    *,
    arrivals: Sequence[float] | None = None,
    concurrency: int | None = None,
    use_tqdm: bool = False,
) -> tuple[Measurement, list[RequestOutput]]:
    """Run all requests to their end.

    Args:
        arrivals: seconds after the start, ascending, at which each request arrives; None: all arrive at the start.
            A request that arrives during a step waits for it, and its time to first token includes the wait.
        concurrency: send a request only while fewer than this many are unfinished; None: no limit. A request that was
            held back arrives when it is sent, unless `arrivals` gives its time.

    Returns:
        The measurement, and the outputs in the order of `items`.

    Raises:
        ValueError: a request cannot be served, or an argument is out of range.
        RuntimeError: a request ended with an error.
    """
    if arrivals is not None and len(arrivals) != len(items):
        raise ValueError(f"{len(arrivals)} arrivals for {len(items)} requests")
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    limit = len(items) if concurrency is None else concurrency
    done: dict[str, RequestOutput] = {}
    ids: list[str] = []
    with recording(llm) as recorder, GenerationProgress(len(items), enabled=use_tqdm) as progress:
        start = time.perf_counter()
        while len(done) < len(items):
            while len(ids) < len(items) and len(ids) - len(done) < limit:
                due = start if arrivals is None else start + arrivals[len(ids)]
                if due > time.perf_counter():
                    break
                arrival = None if arrivals is None else due
                ids.append(llm.add_request(items[len(ids)].prompt, params[len(ids)], arrival_time=arrival))
            if len(ids) == len(done):
                assert arrivals is not None
                time.sleep(max(0.0, start + arrivals[len(ids)] - time.perf_counter()))
                continue
            for output in llm.step():
                done[output.request_id] = output
                progress.update(output)
        seconds = time.perf_counter() - start
    outputs = [done[request_id] for request_id in ids]
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(items)} requests failed, the first with: {failed[0].error}")
    measurement = recorder.measurement(
        num_requests=len(items),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds=seconds,
    )
    return measurement, outputs
