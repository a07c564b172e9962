"""`jaxinfer bench serve`: a workload over HTTP, to any server of OpenAI's API. It loads no JAX."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from jaxinfer.bench.environment import describe_client
from jaxinfer.bench.http import Address
from jaxinfer.bench.report import served_table, show
from jaxinfer.bench.served import Reading, ServedMeasurement
from jaxinfer.bench.served_driver import Target, run_served
from jaxinfer.bench.texts import TEXT_WORKLOADS
from jaxinfer.bench.workload import WorkItem, poisson_arrivals, random_workload, read_workload

_KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's clients have it


def run_bench_serve(args: argparse.Namespace) -> None:
    """Measure and report as the options of `jaxinfer bench serve` say.

    Raises:
        RuntimeError: no request has succeeded.
    """
    items, settings = _items(args)
    arrivals = None
    if args.request_rate is not None:
        arrivals = poisson_arrivals(num_requests=len(items), request_rate=args.request_rate, seed=args.seed)
    target = Target(
        Address.parse(args.base_url), args.endpoint, args.api_key or os.environ.get(_KEY_VARIABLE), args.timeout
    )
    model, readings, seconds = asyncio.run(_measure(target, items, arrivals, args))
    measured = ServedMeasurement.of(readings, seconds)
    settings = {
        "base_url": args.base_url, "model": model, "endpoint": args.endpoint, **settings, "seed": args.seed,
        "temperature": args.temperature, "stream": args.stream, "request_rate": args.request_rate,
        "concurrency": args.concurrency, "ignore_eos": args.ignore_eos, "extra_body": args.extra_body,
    }  # fmt: skip
    result = {
        "benchmark": "serve",
        "settings": settings,
        "environment": describe_client(),
        "results": measured.as_json(),
    }
    show(served_table(measured, title=f"{model} at {args.base_url}"), result, args.json)
    if not measured.num_requests:
        raise RuntimeError(f"no request has succeeded: {next(iter(measured.errors))}")


async def _measure(
    target: Target, items: Sequence[WorkItem], arrivals: Sequence[float] | None, args: argparse.Namespace
) -> tuple[str, list[Reading], float]:
    model = args.model or await target.first_model()
    bodies = [_body(item, number, model, args) for number, item in enumerate(items)]
    with tqdm(total=len(bodies), desc="Answered requests", unit="request", dynamic_ncols=True) as bar:
        readings, seconds = await run_served(
            target, bodies, arrivals=arrivals, concurrency=args.concurrency, done=lambda reading: bar.update()
        )
    return model, readings, seconds


def _items(args: argparse.Namespace) -> tuple[list[WorkItem], dict[str, Any]]:
    """The requests of the workload, and the settings that they follow from.

    Raises:
        ValueError: the endpoint does not take them.
    """
    if args.dataset is not None:
        items, settings = read_workload(args.dataset), {"dataset": str(args.dataset)}
    else:
        settings = {"workload": args.workload, "input_len": str(args.input_len), "output_len": str(args.output_len)}
        if args.vocab_size is None:
            items = TEXT_WORKLOADS[args.workload](args.num_requests, args.input_len, args.output_len, args.seed)
        elif args.workload != "random":
            raise ValueError(f"--vocab-size goes with --workload random, got {args.workload}")
        else:
            items = random_workload(
                num_requests=args.num_requests, input_len=args.input_len, output_len=args.output_len,
                vocab_size=args.vocab_size, seed=args.seed,
            )  # fmt: skip
            settings["vocab_size"] = args.vocab_size
    if args.endpoint == "chat" and not all(isinstance(item.prompt, str) for item in items):
        raise ValueError("prompts of token ids go with --endpoint completions")
    return items, settings | {"num_requests": len(items)}


def _body(item: WorkItem, number: int, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """What is sent of a request: nothing but fields of OpenAI's API, unless an option asks for others."""
    prompt = item.prompt if isinstance(item.prompt, str) else item.prompt["prompt_token_ids"]
    asked = {"messages": [{"role": "user", "content": prompt}]} if args.endpoint == "chat" else {"prompt": prompt}
    body = {"model": model, **asked, "max_tokens": item.max_tokens, "temperature": args.temperature}
    body["seed"] = args.seed + number
    if args.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if args.usage_in_pieces:
            body["stream_options"]["continuous_usage_stats"] = True
    if args.ignore_eos:
        body["ignore_eos"] = True
    return body | (args.extra_body or {})
