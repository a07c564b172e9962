"""What the prefix cache saves: a chat of eight turns with and without it, and many requests over one system prompt."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.bench.environment import describe_environment

ROOT = Path(__file__).resolve().parent.parent
TURNS = (
    "How do I repair a bicycle? Use five points.",
    "I want to build a kite. Give me 5 steps.",
    "What is the best way to plant a rose hedge?",
    "Make a plan: train a parrot.",
    "How do I clean a clock?",
    "I want to draw a boat. What are the steps?",
    "Make a plan with 4 points: build a drum.",
    "What is the best way to repair a ladder?",
)
SYSTEM = "Answer with [PLAN] and a list of points, or with [DIRECT] and one short answer."
ANSWER_TOKENS = 100
SYSTEM_TOKENS, NUM_REQUESTS = 512, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="the best of N counts; default: %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks", metavar="DIR", help="default: benchmarks/")
    args = parser.parse_args()
    engines = {cached: LLM(enable_prefix_caching=cached) for cached in (True, False)}
    chats: dict[bool, list[list[RequestOutput]]] = {True: [], False: []}
    for number in range(args.rounds + 1):
        for cached, llm in engines.items():
            outputs = chat(llm)
            if number:  # the first round compiles
                chats[cached].append(outputs)
    result = {"chat": compare_chats(chats[True], chats[False]), "shared_system_prompt": share(engines[True])}
    print_tables(result)
    result["environment"] = describe_environment()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "chat_cache.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def chat(llm: LLM) -> list[RequestOutput]:
    """One conversation from an empty cache; the outputs of its turns."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    messages, outputs = [{"role": "system", "content": SYSTEM}], []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        [output] = llm.chat(messages, params, use_tqdm=False)
        outputs.append(output)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return outputs


def compare_chats(cached: list[list[RequestOutput]], plain: list[list[RequestOutput]]) -> dict[str, Any]:
    """Turn by turn: prompt, reuse, and the seconds to the first token, each the best of its rounds."""
    turns = []
    for number in range(len(TURNS)):
        with_cache, without = [chat[number] for chat in cached], [chat[number] for chat in plain]
        tokens = len(with_cache[0].prompt_token_ids)
        turns.append(
            {
                "prompt_tokens": tokens,
                "cached_tokens": with_cache[0].num_cached_tokens,
                "reuse": with_cache[0].num_cached_tokens / tokens,
                "ttft_seconds": min(map(first_token_seconds, with_cache)),
                "ttft_seconds_without_cache": min(map(first_token_seconds, without)),
                "same_tokens": with_cache[0].outputs[0].token_ids == without[0].outputs[0].token_ids,
            }
        )
    later = turns[1:]
    return {
        "turns": turns,
        "reuse_from_turn_2": sum(t["cached_tokens"] for t in later) / sum(t["prompt_tokens"] for t in later),
        "ttft_ratio_at_last_turn": turns[-1]["ttft_seconds_without_cache"] / turns[-1]["ttft_seconds"],
    }


def first_token_seconds(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None
    return metrics.first_token_time - metrics.arrival_time


def share(llm: LLM) -> dict[str, Any]:
    """Many requests at once with one long beginning: prompt tokens that were computed, and that had to be."""
    llm.reset_prefix_cache()
    rng = np.random.default_rng(0)
    vocab = llm.model_config.vocab_size
    system = rng.integers(0, vocab, SYSTEM_TOKENS).tolist()
    own = [rng.integers(0, vocab, rng.integers(8, 65)).tolist() for _ in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": system + tokens} for tokens in own], params, use_tqdm=False)
    computed = sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs)
    unavoidable = SYSTEM_TOKENS + sum(map(len, own))
    return {
        "requests": NUM_REQUESTS,
        "system_tokens": SYSTEM_TOKENS,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "computed": computed,
        "unavoidable": unavoidable,
        "ratio": computed / unavoidable,
    }


def print_tables(result: dict[str, Any]) -> None:
    found = result["chat"]
    table = Table(title="a chat with and without the prefix cache", title_justify="left")
    for heading in ("turn", "prompt", "cached", "reuse", "first token, ms", "without cache", "ratio", "same tokens"):
        table.add_column(heading, justify="right")
    for number, turn in enumerate(found["turns"], start=1):
        fast, slow = turn["ttft_seconds"], turn["ttft_seconds_without_cache"]
        table.add_row(
            str(number), str(turn["prompt_tokens"]), str(turn["cached_tokens"]), f"{turn['reuse']:.0%}",
            f"{1000 * fast:.1f}", f"{1000 * slow:.1f}", f"{slow / fast:.1f}x", "yes" if turn["same_tokens"] else "no",
        )  # fmt: skip
    console = Console()
    console.print(table)
    shared = result["shared_system_prompt"]
    console.print(
        f"{found['reuse_from_turn_2']:.1%} of prompt tokens reused from turn 2 on\n"
        f"{shared['requests']} requests over {shared['system_tokens']} common tokens: {shared['computed']} prompt "
        f"tokens computed, {shared['ratio']:.2f} times the unavoidable {shared['unavoidable']}"
    )


if __name__ == "__main__":
    main()
