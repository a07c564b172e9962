"""`jaxinfer bench latency`: total and per-token time of one batch of fixed lengths, repeated."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.table import Table

from jaxinfer.bench.driver import run_workload
from jaxinfer.bench.environment import describe_environment
from jaxinfer.bench.measurement import Measurement
from jaxinfer.bench.report import MILLISECONDS, measurement_table, milliseconds, show
from jaxinfer.bench.summary import Summary
from jaxinfer.bench.workload import LengthRange, random_workload
from jaxinfer.cli.engine_limits import engine_arguments, engine_settings
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams


def run_latency(args: argparse.Namespace) -> None:
    """Measure and report as the options of `jaxinfer bench latency` say."""
    for name in ("batch_size", "num_iters"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len, ignore_eos=True, seed=args.seed)
    input_len = LengthRange(args.input_len, args.input_len)
    output_len = LengthRange(args.output_len, args.output_len)
    llm = LLM(args.model, **engine_arguments(args))
    llm.warm_up()
    runs: list[Measurement] = []
    # The first iteration is not counted: it touches memory that the others find resident.
    for iteration in range(args.num_iters + 1):
        items = random_workload(
            num_requests=args.batch_size, input_len=input_len, output_len=output_len,
            vocab_size=llm.model_config.vocab_size, seed=args.seed + iteration,
        )  # fmt: skip
        measured, _ = run_workload(llm, items, [params] * args.batch_size, use_tqdm=False)
        if iteration:
            runs.append(measured)
    settings = {
        "model": args.model or "embedded", "batch_size": args.batch_size, "input_len": args.input_len,
        "output_len": args.output_len, "num_iters": args.num_iters, "temperature": args.temperature, "seed": args.seed,
    }  # fmt: skip
    result: dict[str, Any] = {
        "benchmark": "latency",
        "settings": settings | engine_settings(llm, args),
        "environment": describe_environment(),
        "results": summarize(runs, args.output_len),
    }
    show(_table(runs, args), result, args.json)


def summarize(runs: list[Measurement], output_len: int) -> dict[str, Any]:
    """Return summaries over the iterations, in seconds per batch and per output token, and each iteration."""
    total, per_token = _summaries(runs, output_len)
    return {
        "seconds": asdict(total),
        "seconds_per_output_token": asdict(per_token),
        "iterations": [run.as_json() for run in runs],
    }


def _summaries(runs: list[Measurement], output_len: int) -> tuple[Summary, Summary]:
    seconds = [run.seconds for run in runs]
    total, per_token = Summary.of(seconds), Summary.of([value / output_len for value in seconds])
    assert total is not None and per_token is not None
    return total, per_token


def _table(runs: list[Measurement], args: argparse.Namespace) -> Table:
    total, per_token = _summaries(runs, args.output_len)
    median = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    shape = f"batch of {args.batch_size}, {args.input_len} in, {args.output_len} out"
    title = f"latency of {args.model or 'embedded'}: {shape}; median of {len(runs)} iterations"
    table = measurement_table(median, title=title)
    table.add_section()
    table.add_row(f"whole batch, {MILLISECONDS}", milliseconds(total))
    table.add_row(f"per output token, {MILLISECONDS}", milliseconds(per_token))
    return table
