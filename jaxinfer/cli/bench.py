"""The command line of `jaxinfer bench`; nothing heavy is imported before a benchmark runs."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.cli.engine_limits import add_engine_limits

BENCH_EXAMPLES = """\
examples:
  jaxinfer bench throughput
  jaxinfer bench latency --batch-size 8
"""
THROUGHPUT_EXAMPLES = """\
examples:
  jaxinfer bench throughput
  jaxinfer bench throughput --model path/to/checkpoint --num-requests 64 --scale 0.25 --json result.json
  jaxinfer bench throughput --input-len 16:128 --output-len 32 --request-rate 4
  jaxinfer bench throughput --dataset requests.jsonl --concurrency 16

A line of a dataset is {"prompt": TEXT, "max_tokens": N} or {"prompt_token_ids": [...], "max_tokens": N}.
"""
LATENCY_EXAMPLES = """\
examples:
  jaxinfer bench latency
  jaxinfer bench latency --model path/to/checkpoint --batch-size 1 --input-len 32 --output-len 128 --num-iters 10
"""


def add_benchmarks(bench: argparse.ArgumentParser, parents: list[argparse.ArgumentParser]) -> None:
    """Add the benchmarks to the verb `bench`; `parents` hold the options of model and errors."""
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    limits = argparse.ArgumentParser(add_help=False)
    add_engine_limits(limits)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--temperature", type=float, default=0.6, metavar="X", help="default: %(default)s; 0 is greedy")
    common.add_argument("--seed", type=int, default=0, metavar="N", help="for lengths, tokens, arrivals and sampling")
    common.add_argument("--json", metavar="FILE", help="write the result to FILE too")

    def add(name: str, summary: str, examples: str) -> argparse.ArgumentParser:
        return benchmarks.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=examples,
            parents=[*parents, limits, common], formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    throughput = add("throughput", "many requests: tokens per second and latencies", THROUGHPUT_EXAMPLES)
    work = throughput.add_argument_group("workload")
    work.add_argument("--dataset", metavar="FILE", help="requests from JSON lines (default: random ones)")
    work.add_argument("--num-requests", type=int, default=256, metavar="N", help="random ones; default: %(default)s")
    for name in ("--input-len", "--output-len"):
        work.add_argument(name, type=_length_range, default="100:1024", metavar="MIN:MAX", help="default: %(default)s")
    work.add_argument(
        "--scale", type=float, metavar="X", help="multiply both lengths (default: 1, or what fits max_model_len)"
    )
    work.add_argument("--request-rate", type=float, metavar="R", help="Poisson arrivals, R a second (default: at once)")
    work.add_argument("--concurrency", type=int, metavar="N", help="at most N unfinished requests (default: no limit)")
    work.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction,
        help="always generate max_tokens (default: for random requests)",
    )  # fmt: skip
    throughput.set_defaults(run=_throughput)

    latency = add("latency", "one batch of fixed lengths, repeated: how long it takes", LATENCY_EXAMPLES)
    work = latency.add_argument_group("workload")
    for name, default in (("--batch-size", 8), ("--input-len", 32), ("--output-len", 128), ("--num-iters", 10)):
        work.add_argument(name, type=int, default=default, metavar="N", help="default: %(default)s")
    latency.set_defaults(run=_latency)


def _length_range(text: str) -> Any:
    from jaxinfer.bench.workload import LengthRange

    try:
        return LengthRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _throughput(args: argparse.Namespace) -> None:
    from jaxinfer.cli.throughput import run_throughput

    run_throughput(args)


def _latency(args: argparse.Namespace) -> None:
    from jaxinfer.cli.latency import run_latency

    run_latency(args)
