"""`jaxinfer batch`: a file of requests, answered line by line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jaxinfer.cli.hosts_options import takes_part
from jaxinfer.cli.ray_options import add_ray_options, check_ray_options
from jaxinfer.cli.serve import add_engine_arguments, engine_options

BATCH_EXAMPLES = """\
examples:
  jaxinfer batch in.jsonl out.jsonl
  jaxinfer batch in.jsonl out.jsonl --model path/to/checkpoint --concurrency 256

  A line of in.jsonl:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon a time"}}

A run that was killed is continued by the same command.
"""


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jaxinfer batch`."""
    parser.add_argument(
        "source", metavar="IN", type=Path, help="requests of chat, completions and responses, one a line"
    )
    parser.add_argument("output", metavar="OUT", type=Path, help="their answers, in the same order; it is continued")
    parser.add_argument("--model", metavar="PATH", help="checkpoint directory or hub id (default: the embedded one)")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="asked at once (default: %(default)s)")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names of the model in requests")
    add_ray_options(parser)
    add_engine_arguments(parser)
    parser.set_defaults(run=run_batch)


def run_batch(args: argparse.Namespace) -> int:
    """Run `jaxinfer batch`; returns 0, also where lines have ended with errors: the output has them.

    Raises:
        ValueError: an option is out of range, or the output has the answers of another file.
        OSError: a file cannot be read or written.
        RuntimeError: another process writes the output, or the engine has failed.
    """
    import asyncio

    from tqdm import tqdm

    from jaxinfer.async_llm import AsyncLLM
    from jaxinfer.batch.lines import lines_of
    from jaxinfer.batch.output import Output
    from jaxinfer.batch.run import Counts, run
    from jaxinfer.server.app import build_app
    from jaxinfer.server.in_process import post
    from jaxinfer.server.service import Service
    from jaxinfer.server.settings import ServerSettings

    if args.concurrency < 1:
        raise ValueError(f"--concurrency must be at least 1, got {args.concurrency}")
    check_ray_options(args)
    options = engine_options(args, "off")
    if takes_part(args, options):
        return 0

    settings = ServerSettings(
        served_model_names=args.served_model_name or (), max_waiting_requests=args.concurrency,
        max_stored_responses=0, page=False,
    )  # fmt: skip
    model = args.model or "tiny"

    async def answer(output: Output, show: Callable[[Counts], None]) -> Counts:
        service = Service(settings, model)
        async with AsyncLLM(**options) as llm:
            service.open(llm)
            ask = partial(post, build_app(service))
            return await run(args.source, output, ask, concurrency=args.concurrency, progress=show)

    with args.source.open("rb"), Output(args.output) as output:
        output.check(lines_of(args.source))  # before a model is loaded
        with tqdm(unit="line", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

            def show(counts: Counts) -> None:
                bar.total = counts.total
                bar.set_postfix_str(f"{counts.failed} with errors", refresh=False)
                bar.update(counts.before + counts.done - bar.n)

            if args.ray:
                from jaxinfer.integrations.ray_data import run as run_with_ray

                counts = run_with_ray(
                    args.source, output, options, settings, model=model, replicas=args.replicas,
                    concurrency=args.concurrency, progress=show,
                )  # fmt: skip
            else:
                counts = asyncio.run(answer(output, show))
    already = f", {counts.before} were answered before" if counts.before else ""
    print(f"{counts.done} lines answered, {counts.failed} of them with errors{already}: {args.output}", file=sys.stderr)
    return 0
