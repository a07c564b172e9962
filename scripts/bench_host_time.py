"""The host's time for a decode step with many running requests, by part, on a model small enough not to hide it.

Counted are the scheduler, the building of batches, and what is done with results (accounting and outputs). Handing a
step to the device is shown beside it: on a CPU, XLA may run a small program in the caller's thread.

Where the device is the CPU, its threads and the host's share cores and caches. So the same is measured once more with
steps that give arbitrary tokens at once, as if they ran elsewhere.

With `--repetition-penalty` and long prompts it says what a penalty costs the host beside requests without one.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from cpu_bench.random_models import qwen3_config, random_model
from jaxinfer.bench.environment import describe_environment
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.frontend.output_processor import OutputProcessor
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.decode_loop import LoopOutput
from jaxinfer.programs.program import Program
from jaxinfer.programs.step import Step, StepOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request

ROOT = Path(__file__).resolve().parent.parent
MODEL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
         "intermediate_size": 32, "vocab_size": 256}  # fmt: skip
PAGE_SIZE = 16
PARTS = ("scheduler", "batch building", "results")


class Stopwatch:
    """Adds up the time that methods of some objects take."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """From here on, calls of `owner.method` count for `part`."""
        run: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - begin

        setattr(owner, method, timed)


class _NoDevice:
    """In a runner's place: every launch is done at once, and every token is 1."""

    def __init__(self, max_decode_steps: int) -> None:
        self.loop = np.ones((max_decode_steps, 1), np.int32)

    def launch(self, program: Program, shape: BatchShape, buffer: np.ndarray) -> Any:
        tokens = np.ones(shape.num_logits, np.int32)
        if isinstance(program, Step):
            return StepOutput(tokens, None, None, None)  # pyright: ignore[reportArgumentType]
        return LoopOutput(tokens * self.loop, None, None)  # pyright: ignore[reportArgumentType]


class Bench:
    """An engine on a tiny model, and its output processor, with a clock at every part."""

    def __init__(
        self, *, max_num_seqs: int, steps: int, max_decode_steps: int, overlap: bool, with_device: bool,
        longest_prompt: int, repetition_penalty: float,
    ) -> None:  # fmt: skip
        longest = longest_prompt + (steps + 2) * max_decode_steps + 64
        self.max_tokens, self.longest_prompt = longest - longest_prompt, longest_prompt
        self.repetition_penalty = repetition_penalty
        config = EngineConfig(
            max_model_len=longest, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_seqs, 512, longest_prompt), page_size=PAGE_SIZE,
            kv_cache_tokens=max_num_seqs * (-(-longest // PAGE_SIZE) * PAGE_SIZE),
            max_decode_steps=max_decode_steps, overlap=overlap,
        )  # fmt: skip
        model = random_model(qwen3_config(**MODEL, max_position_embeddings=longest))
        self.core = EngineCore(model, config, dtype=jnp.dtype(jnp.float32))
        self.processor = OutputProcessor(self.core, None)
        self.inbox = self.processor.inbox()
        if not with_device:
            self.core.launcher.runner = _NoDevice(max_decode_steps)  # pyright: ignore[reportAttributeAccessIssue]
        self.watch = Stopwatch()
        self.watch.watch(self.core.scheduler, "schedule", "scheduler")
        for method in ("remove", "build"):
            self.watch.watch(self.core.input_batch, method, "batch building")
        self.watch.watch(self.core.launcher.runner, "launch", "launch")
        self.watch.watch(self.processor, "process", "outputs")
        self.core.landing_listeners.append(self.processor.process)

    def step(self) -> dict[str, float]:
        """One step; milliseconds of each part."""
        self.watch.seconds.clear()
        before = self.core.metrics.host_seconds_total
        self.core.step()
        self.inbox.take()
        seconds = self.watch.seconds
        # What the engine counts, less what stands for itself: reading results into requests and metrics.
        engine = self.core.metrics.host_seconds_total - before
        accounting = engine - seconds["launch"] - seconds["scheduler"] - seconds["batch building"]
        parts = {
            "scheduler": seconds["scheduler"],
            "batch building": seconds["batch building"],
            "results": accounting + seconds["outputs"],
        }
        return {
            name: 1000 * value
            for name, value in (parts | {"host": sum(parts.values()), "launch": seconds["launch"]}).items()
        }

    def run(self, num_requests: int, steps: int, profile: cProfile.Profile | None = None) -> dict[str, float]:
        """Median milliseconds of each part over `steps` launches, each a decode of all of `num_requests`."""
        rng = np.random.default_rng(num_requests)
        params = SamplingParams(
            temperature=1.0, max_tokens=self.max_tokens, ignore_eos=True, repetition_penalty=self.repetition_penalty
        )
        # Of all lengths, so that rows enter new pages one after the other and not all at once.
        lengths = [self.longest_prompt - number % (2 * PAGE_SIZE) for number in range(num_requests)]
        requests = [
            Request(
                request_id=f"{num_requests}.{number}", sampling_params=params, request_key=(num_requests, number),
                prompt_token_ids=rng.integers(0, MODEL["vocab_size"], length).tolist(),
                max_total_tokens=length + self.max_tokens,
            )
            for number, length in enumerate(lengths)
        ]  # fmt: skip
        for request in requests:
            self.processor.follow(request, self.inbox, stream=False)
            self.core.add_request(request)
        while any(request.num_output_tokens == 0 for request in requests):
            self.step()
        self.step()
        if profile is not None:
            profile.enable()
        samples = [self.step() for _ in range(steps)]
        if profile is not None:
            profile.disable()
        for request in requests:
            self.core.abort(request.request_id)
        self.core.step()
        self.core.check_integrity()
        return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256], metavar="N", help="requests")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="launches to take the median of")
    parser.add_argument("--prompt-tokens", type=int, default=2 * PAGE_SIZE, metavar="N", help="of the longest prompt")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="P", help="of all requests")
    parser.add_argument("--no-overlap", action="store_true", help="read results before the next launch")
    parser.add_argument("--no-device", action="store_true", help="measure only as if steps ran elsewhere: in a minute")
    parser.add_argument("--profile", action="store_true", help="print where the most requests' time goes, by function")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks", metavar="DIR", help="default: benchmarks/")
    args = parser.parse_args()

    most = max(args.running)
    assert args.prompt_tokens >= 2 * PAGE_SIZE, "prompts have as many different lengths as two pages have tokens"
    result: dict[str, Any] = {
        "model": MODEL, "launches": args.steps, "overlap": not args.no_overlap, "prompt_tokens": args.prompt_tokens,
        "repetition_penalty": args.repetition_penalty,
    }  # fmt: skip
    for with_device in (False,) if args.no_device else (True, False):
        for max_decode_steps in (1, EngineConfig.max_decode_steps):
            bench = Bench(
                max_num_seqs=most, steps=args.steps, max_decode_steps=max_decode_steps, overlap=not args.no_overlap,
                with_device=with_device, longest_prompt=args.prompt_tokens, repetition_penalty=args.repetition_penalty,
            )  # fmt: skip
            rows = {}
            for running in args.running:
                bench.run(running, 2)  # compiles
                rows[str(running)] = bench.run(running, args.steps)
            device = "device: this CPU" if with_device else "device: none"
            result[f"{device}, max_decode_steps={max_decode_steps}"] = rows
            print_table(rows, max_decode_steps, device)
            if args.profile:
                profile = cProfile.Profile()
                bench.run(most, args.steps, profile)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if not args.profile:
        result["environment"] = describe_environment()
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "host_time.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def print_table(rows: dict[str, dict[str, float]], max_decode_steps: int, device: str) -> None:
    """A row for each number of running requests; a launch's own time is shown, and not part of the host's."""
    title = f"median milliseconds of the host for a launch of {max_decode_steps} decode step(s), {device}"
    table = Table(title=title, title_justify="left")
    for heading in ("running", "host", *PARTS, "per step", "(launch)"):
        table.add_column(heading, justify="right")
    for running, parts in rows.items():
        numbers = [parts["host"], *(parts[name] for name in PARTS), parts["host"] / max_decode_steps, parts["launch"]]
        table.add_row(running, *(f"{number:.3f}" for number in numbers))
    Console().print(table)


if __name__ == "__main__":
    main()
