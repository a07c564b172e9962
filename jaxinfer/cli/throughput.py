"""`jaxinfer bench throughput`: many requests, closed or Poisson arrivals, tokens per second and latencies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jaxinfer.bench.driver import run_workload
from jaxinfer.bench.environment import describe_environment
from jaxinfer.bench.report import measurement_table, show
from jaxinfer.bench.workload import (
    LengthRange,
    WorkItem,
    fitting_scale,
    poisson_arrivals,
    random_workload,
    read_workload,
)
from jaxinfer.cli.engine_limits import engine_arguments, engine_settings
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams


def run_throughput(args: argparse.Namespace) -> None:
    """Measure and report as the options of `jaxinfer bench throughput` say."""
    settings: dict[str, Any] = {"model": args.model or "embedded", "seed": args.seed, "temperature": args.temperature}
    ignore_eos = args.dataset is None if args.ignore_eos is None else args.ignore_eos
    settings |= {"ignore_eos": ignore_eos, "request_rate": args.request_rate, "concurrency": args.concurrency}
    SamplingParams(temperature=args.temperature)  # bad values are reported before a model is loaded
    items = None if args.dataset is None else read_workload(args.dataset)
    if args.request_rate is not None:
        poisson_arrivals(num_requests=1, request_rate=args.request_rate, seed=args.seed)
    llm = LLM(args.model, **engine_arguments(args))
    if items is None:
        items, lengths = _random_items(llm, args)
        settings |= lengths
    else:
        settings |= {"dataset": str(args.dataset), "num_requests": len(items)}
    params = _sampling(items, temperature=args.temperature, ignore_eos=ignore_eos, seed=args.seed)
    arrivals = None
    if args.request_rate is not None:
        arrivals = poisson_arrivals(num_requests=len(items), request_rate=args.request_rate, seed=args.seed)
    llm.warm_up()
    measured, _ = run_workload(
        llm, items, params, arrivals=arrivals, concurrency=args.concurrency, use_tqdm=True
    )  # fmt: skip
    result = {
        "benchmark": "throughput",
        "settings": settings | engine_settings(llm, args),
        "environment": describe_environment(),
        "results": measured.as_json(),
    }
    show(measurement_table(measured, title=f"throughput of {settings['model']}"), result, args.json)


def _random_items(llm: LLM, args: argparse.Namespace) -> tuple[list[WorkItem], dict[str, Any]]:
    """Make random requests, scaled down to the model's length where no scale is given; returns them and settings."""
    longest = llm.core.config.max_model_len
    scale = args.scale
    if scale is None:
        scale = fitting_scale(args.input_len, args.output_len, longest)
        if scale < 1:
            print(
                f"lengths are scaled by {scale:.3f}: {args.input_len} in and {args.output_len} out exceed "
                f"max_model_len={longest}",
                file=sys.stderr,
            )
    input_len, output_len = args.input_len.scaled(scale), args.output_len.scaled(scale)
    _check_fits(input_len, output_len, longest)
    items = random_workload(
        num_requests=args.num_requests, input_len=input_len, output_len=output_len,
        vocab_size=llm.model_config.vocab_size, seed=args.seed,
    )  # fmt: skip
    return items, {
        "num_requests": args.num_requests, "input_len": str(input_len), "output_len": str(output_len), "scale": scale,
    }  # fmt: skip


def _check_fits(input_len: LengthRange, output_len: LengthRange, max_model_len: int) -> None:
    if input_len.longest + output_len.longest > max_model_len:
        raise ValueError(
            f"prompts of up to {input_len.longest} tokens and outputs of up to {output_len.longest} exceed "
            f"max_model_len={max_model_len}: lower --scale or leave it out"
        )


def _sampling(items: Sequence[WorkItem], *, temperature: float, ignore_eos: bool, seed: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_tokens=item.max_tokens, ignore_eos=ignore_eos, seed=seed + number)
        for number, item in enumerate(items)
    ]
