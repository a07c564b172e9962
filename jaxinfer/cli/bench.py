"""The command line of `jaxinfer bench`; nothing heavy is imported before a benchmark runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from jaxinfer.cli.engine_limits import add_engine_limits
from jaxinfer.cli.serve import json_object

BENCH_EXAMPLES = """\
examples:
  jaxinfer bench throughput
  jaxinfer bench latency --batch-size 8
  jaxinfer bench serve --base-url http://127.0.0.1:8000/v1 --concurrency 8
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


SERVE_BENCH_EXAMPLES = """\
examples:
  jaxinfer bench serve
  jaxinfer bench serve --base-url http://127.0.0.1:8000/v1 --request-rate 4 --json result.json
  jaxinfer bench serve --workload shared-prefix --input-len 200:400 --output-len 64 --concurrency 16
  jaxinfer bench serve --endpoint completions --vocab-size 2048 --ignore-eos --usage-in-pieces
  jaxinfer bench serve --dataset requests.jsonl --no-stream --extra-body '{"top_p": 0.9}'

Each request has a connection of its own. Tokens are those of the answers' usage. Without --usage-in-pieces a server
does not say how many tokens a piece of a stream has: then there is the time per output token of each answer, and the
time between pieces.
"""


def add_benchmarks(
    bench: argparse.ArgumentParser, engine: argparse.ArgumentParser, verbose: argparse.ArgumentParser
) -> None:
    """Add the benchmarks to the verb `bench`; `engine` and `verbose` hold the options of a model and of errors."""
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    limits = argparse.ArgumentParser(add_help=False)
    add_engine_limits(limits)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--temperature", type=float, default=0.6, metavar="X", help="default: %(default)s; 0 is greedy")
    common.add_argument("--seed", type=int, default=0, metavar="N", help="for lengths, tokens, arrivals and sampling")
    common.add_argument("--json", metavar="FILE", help="write the result to FILE too")

    def add(
        name: str, summary: str, examples: str, parents: Sequence[argparse.ArgumentParser] = (engine, verbose, limits)
    ) -> argparse.ArgumentParser:
        return benchmarks.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=examples,
            parents=[*parents, common], formatter_class=argparse.RawDescriptionHelpFormatter,
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
    _add_arrivals(work)
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
    _add_serve(add("serve", "a server over HTTP: latencies and tokens per second", SERVE_BENCH_EXAMPLES, [verbose]))


def _add_serve(serve: argparse.ArgumentParser) -> None:
    server = serve.add_argument_group("server (any of OpenAI's API)")
    server.add_argument("--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="default: %(default)s")
    server.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    server.add_argument("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY, if set")
    server.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for one request")
    work = serve.add_argument_group("workload")
    work.add_argument("--dataset", metavar="FILE", help="requests from JSON lines, as `bench throughput` reads them")
    work.add_argument(
        "--workload", choices=["random", "shared-prefix"], default="random",
        help="prompts of random words, or of words whose first half all share (default: %(default)s)",
    )  # fmt: skip
    work.add_argument("--num-requests", type=int, default=64, metavar="N", help="default: %(default)s")
    for name, default, unit in (
        ("--input-len", "32:256", "words, or tokens with --vocab-size"),
        ("--output-len", "16:128", "tokens"),
    ):
        work.add_argument(
            name, type=_length_range, default=default, metavar="MIN:MAX", help=f"in {unit}; default: %(default)s"
        )
    work.add_argument("--vocab-size", type=int, metavar="N", help="prompts are random token ids below N")
    _add_arrivals(work)
    asked = serve.add_argument_group("requests")
    asked.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="default: %(default)s")
    asked.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="streamed or whole answers"
    )
    asked.add_argument(
        "--usage-in-pieces", action="store_true",
        help="ask for the usage so far in every piece of a stream (vLLM, jaxinfer)",
    )  # fmt: skip
    asked.add_argument("--ignore-eos", action="store_true", help="always generate max_tokens (vLLM, SGLang, jaxinfer)")
    asked.add_argument("--extra-body", type=json_object, metavar="JSON", help="further fields of every request")
    serve.set_defaults(run=_serve)


def _add_arrivals(work: Any) -> None:
    """Add the options of when requests arrive to a group."""
    work.add_argument("--request-rate", type=float, metavar="R", help="Poisson arrivals, R a second (default: at once)")
    work.add_argument("--concurrency", type=int, metavar="N", help="at most N unfinished requests (default: no limit)")


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


def _serve(args: argparse.Namespace) -> None:
    from jaxinfer.cli.bench_serve import run_bench_serve

    run_bench_serve(args)
