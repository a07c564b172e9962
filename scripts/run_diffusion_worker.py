"""Run a file of prompts through a diffusion worker, batch after batch, and print what each batch took.

A line of the file is a JSON value: a text, a list of chat messages, or {"prompt_token_ids": [...]}. The model is a
diffusion model, whose tokens see the whole sequence here even if it is block-causal, or --random: one with random
weights, whose text means nothing but whose time is real. The seconds of a batch are all that it took: for the first
ones of a run, compiling too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_bench.random_models import random_model
from jaxinfer.checkpoint.directory import embedded_checkpoint, find_checkpoint
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.config import resolve_dtype
from jaxinfer.diffusion.config import CACHES, UNMASK_RULES
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.rope import RopeConfig
from jaxinfer.textbook.diffusion.batches import ModelWorkerBatch
from jaxinfer.textbook.diffusion.worker import DiffusionWorker
from jaxinfer.tokenizer import Tokenizer

RANDOM: dict[str, dict[str, Any]] = {
    "LLaDAModelLM": {},
    "LLaDAMoEModelLM": {"qk_norm": True, "experts": ExpertsConfig(8, 2, 256, normalizes=False)},
    "LLaDA2MoeModelLM": {
        "qk_norm": True,
        "block_size": 32,
        "rope": RopeConfig(partial_rotary_factor=0.5),
        "experts": ExpertsConfig(
            8,
            2,
            256,
            shared_size=256,
            dense_layers=(0,),
            score="sigmoid",
            has_bias=True,
            scaling=2.5,
            num_groups=4,
            kept_groups=2,
        ),
    },
}
SETTINGS: dict[str, tuple[Any, str]] = {
    "block_size": (32, "tokens that are denoised together"),
    "threshold": (0.9, "a token that is so sure is committed"),
    "low_threshold": (0.4, "of --unmask hierarchy"),
    "factor": (1.0, "of --unmask factor"),
    "prefix_look": (16, "tokens before a block that are computed with it"),
    "after_look": (16, "tokens after a block that are computed with it"),
    "warmup_steps": (4, "first iterations, which compute everything"),
    "cont_weight": (0.3, "of smoothed embeddings; 0: none"),
    "maximum_unroll": (4, "most iterations in a launch"),
    "expected_tpf": (8, "tokens that an iteration commits, as far as one can tell"),
}
HEADINGS = ("batch", "requests", "tokens", "forwards", "tokens a forward", "tokens/s")


@dataclass(frozen=True)
class Measured:
    """What some requests took; forwards are counted for each of them."""

    requests: int
    tokens: int
    forwards: int
    seconds: float

    @classmethod
    def total(cls, batches: Sequence[Measured]) -> Measured:
        names = ("requests", "tokens", "forwards", "seconds")
        return cls(*(sum(getattr(each, name) for each in batches) for name in names))

    def cells(self, name: str) -> tuple[str, ...]:
        a_forward, a_second = self.tokens / self.forwards, self.tokens / self.seconds
        return name, str(self.requests), str(self.tokens), str(self.forwards), f"{a_forward:.2f}", f"{a_second:.1f}"


def read_prompts(lines: Iterable[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """The token ids of a file's prompts; empty lines are none.

    Raises:
        ValueError: a line is no prompt, or needs a tokenizer that is not there; it says which.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(token_ids_of(json.loads(line), tokenizer))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    if not prompts:
        raise ValueError("there is no prompt")
    return prompts


def token_ids_of(prompt: Any, tokenizer: Tokenizer | None) -> list[int]:
    """The token ids of one prompt.

    Raises:
        ValueError: as for `read_prompts`.
    """
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), list):
        return prompt["prompt_token_ids"]
    if not isinstance(prompt, str | list):
        raise ValueError('a prompt is a text, a list of messages or {"prompt_token_ids": [...]}')
    if tokenizer is None:
        raise ValueError('the checkpoint has no tokenizer: use {"prompt_token_ids": [...]}')
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt)


def random_diffusion_model(architecture: str, vocab_size: int) -> DecoderLM:
    """A small model of random weights with one token more than a tokenizer has: the mask."""
    config = ModelConfig(
        architecture=architecture, vocab_size=vocab_size + 1, hidden_size=256, intermediate_size=704, num_layers=4,
        num_heads=4, num_kv_heads=4, head_dim=64, max_position_embeddings=4096, mask_token_id=vocab_size,
        **RANDOM[architecture],
    )  # fmt: skip
    return random_model(config)


def run(
    worker: DiffusionWorker, prompts: Sequence[list[int]], batch_size: int, **how: Any
) -> Iterator[tuple[Measured, list[list[int]]]]:
    """What each batch took, and its answers, as they come.

    Args:
        how: the rest of a `ModelWorkerBatch`.
    """
    for together in itertools.batched(prompts, batch_size):
        begin = time.perf_counter()
        batch = ModelWorkerBatch(together, **how)
        state = worker.prefill(batch).batch_state
        while not state.is_finished:
            worker.extend(batch, state)
        tokens = sum(map(len, state.output_ids))
        seconds = time.perf_counter() - begin
        yield Measured(len(together), tokens, sum(state.iteration_counters), seconds), state.output_ids


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="file of prompts, JSON lines")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="DIR", help="checkpoint directory or hub id")
    which.add_argument("--random", choices=RANDOM, help="a small random model, with the embedded tokenizer")
    parser.add_argument("--dtype", default="auto", help="of --model (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s, off")
    parser.add_argument("--top-k", type=int, default=0, help="default: %(default)s, off")
    parser.add_argument("--seed", type=int, default=0, help="of a batch's first request (default: %(default)s)")
    parser.add_argument("--unmask", choices=UNMASK_RULES, default="threshold", help="default: %(default)s")
    parser.add_argument("--cache", choices=CACHES[1:], default="dual", help="default: %(default)s")
    for name, (default, text) in SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, metavar="X", help=f"{text} (default: {default})")
    parser.add_argument("--output", type=Path, metavar="PATH", help="write the answers here, JSON lines")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    directory = embedded_checkpoint() if options.random else find_checkpoint(options.model)
    tokenizer = Tokenizer(directory) if Tokenizer.exists(directory) else None
    prompts = read_prompts(options.prompts.read_text(encoding="utf-8").splitlines(), tokenizer)
    if options.random:
        assert tokenizer is not None
        model = random_diffusion_model(options.random, tokenizer.fast.get_vocab_size())
    else:
        _, model = load_checkpoint(directory, dtype=resolve_dtype(options.dtype))
    settings = {name: getattr(options, name) for name in ("unmask", "cache", *SETTINGS)}
    worker = DiffusionWorker(None, None, model=model, **settings)
    print(line_of(HEADINGS), line_of(["---:"] * len(HEADINGS)), sep="\n")
    measured, answers = [], []
    how = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
    how["seeds"] = options.seed
    for number, (batch, found) in enumerate(run(worker, prompts, options.batch_size, **how), start=1):
        print(line_of(batch.cells(str(number))), flush=True)
        measured.append(batch)
        answers += found
    print(line_of(Measured.total(measured).cells("total")))
    if options.output is not None:
        texts = [{} if tokenizer is None else {"text": tokenizer.decode(answer)} for answer in answers]
        lines = (json.dumps({"token_ids": answer, **text}) for answer, text in zip(answers, texts, strict=True))
        options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
