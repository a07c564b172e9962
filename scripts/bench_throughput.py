"""Throughput of a checkpoint at several batch sizes: prompts of random tokens, a fixed number of output tokens each."""

from __future__ import annotations

import argparse
import random
import time

from rich.console import Console
from rich.table import Table

from jaxinfer import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint directory (default: the embedded one)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=64, metavar="N")
    args = parser.parse_args()

    llm = LLM(args.model)
    table = Table(title=f"{args.prompt_tokens} prompt tokens, {args.output_tokens} output tokens", title_justify="left")
    for heading in ("requests", "output tokens per second", "seconds", "steps", "milliseconds per step"):
        table.add_column(heading, justify="right")
    for batch_size in args.batch_sizes:
        # The first run compiles the shapes that the second one is timed with, for prompts of its own.
        run(llm, batch_size, args.prompt_tokens, args.output_tokens, seed=0)
        seconds, steps = run(llm, batch_size, args.prompt_tokens, args.output_tokens, seed=1)
        rate = batch_size * args.output_tokens / seconds
        table.add_row(
            f"{batch_size}", f"{rate:.1f}", f"{seconds:.2f}", f"{steps}", f"{1000 * seconds / steps:.2f}"
        )  # fmt: skip
    Console().print(table)


def run(llm: LLM, batch_size: int, prompt_tokens: int, output_tokens: int, seed: int) -> tuple[float, int]:
    """Seconds and steps of one batch, greedy, with the end of sequence ignored."""
    rng = random.Random(seed)
    vocab_size = llm.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(batch_size)]
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    steps_before = llm.get_metrics().num_steps_total
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, llm.get_metrics().num_steps_total - steps_before


if __name__ == "__main__":
    main()
