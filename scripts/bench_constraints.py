"""Measure what structured output costs the host: compiling a grammar, and one step along a text with its mask.

    nice .venv/bin/python scripts/bench_constraints.py
    nice .venv/bin/python scripts/bench_constraints.py --vocab 129280 --tokens 2000

The vocabulary of 2,048 tokens is the embedded checkpoint's. Larger ones are byte-level BPE vocabularies made here from
random merges. No model runs. A walk draws its tokens uniformly from those that are allowed, which leads through more
states than a model's text; the text of a walk is an instance of the schema as `json.dumps` writes it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from rich.console import Console
from rich.table import Table

from jaxinfer.constraints.guidance import Guidance, GuidanceAutomaton
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams

EMBEDDED = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny" / "tokenizer.json"
END = "<|end|>"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOLS = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"name": {"const": f"tool_{number}"}, "arguments": PERSON},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number in range(20)
    ]
}
INSTANCE = {"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "poetical science", "engines"] * 30}
GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {
    "object": ({"json": PERSON}, json.dumps(INSTANCE)),
    "20 tools": ({"json": TOOLS}, json.dumps({"name": "tool_7", "arguments": INSTANCE})),
    "any JSON": ({"json": {}}, json.dumps(INSTANCE, indent=2)),
    "strings of at most 2,000": (
        {"json": {"type": "array", "items": {"type": "string", "maxLength": 2000}}},
        json.dumps(INSTANCE["tags"]),
    ),
    "regex": ({"regex": r"([a-z]+ [0-9]{1,4}, )*end"}, "apples 12, pears 7, " * 40 + "end"),
}


def bpe(num_tokens: int) -> str:
    """The tokenizer.json of a byte-level BPE vocabulary: the bytes, random merges of common ones, and an end."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocab = {letter: number for number, letter in enumerate(letters.values())}
    # Letters come most often, as in text: few tokens have a quote or a brace in them.
    common = [
        letters[byte] for byte in b"etaoinshrdlucmfwypvbgkqjxz" * 12 + b" " * 20 + b"ETAOINSHRDLUCMFWYPVBGKQJXZ" * 2
    ]
    common += [letters[byte] for byte in b"0123456789_-.,;:\"'{}[]()/\\\n\t"]
    merges, pool, rng = [], list(common), random.Random(0)
    while len(vocab) < num_tokens - 1:
        left, right = rng.choice(pool), rng.choice(pool if rng.random() < 0.5 else common)
        if len(left + right) <= 16 and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
            pool.append(left + right)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": num_tokens - 1, "content": END, **flags}], "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                "vocab": vocab, "merges": merges,
            },
        }
    )  # fmt: skip


def timed[T](run: Callable[[], T]) -> tuple[T, float]:
    """What `run` returns, and its microseconds."""
    begin = time.perf_counter()
    value = run()
    return value, 1e6 * (time.perf_counter() - begin)


def drawn(automaton: GuidanceAutomaton, end: int, seed: int, most: int) -> Iterator[int]:
    """Tokens of a random walk, again from the start after an end."""
    rng, state = random.Random(seed), automaton.start
    for _ in range(most):
        on = np.flatnonzero(np.unpackbits(automaton.bits(state).view(np.uint8), bitorder="little"))
        token = int(rng.choice(on))
        yield token
        following = None if token == end else automaton.advance(state, token)
        state = following or automaton.start


def steps(automaton: GuidanceAutomaton, tokens: Iterable[int], end: int) -> list[float]:
    """Microseconds of each step along tokens: to the state after one, and its mask."""
    state, spent = automaton.start, []

    def step() -> Any:
        following = automaton.advance(state, token)
        if following is not None:
            automaton.bits(following)
        return following

    for token in tokens:
        if token == end:
            state = automaton.start
            continue
        following, microseconds = timed(step)
        if following is None:  # a text that the tokenizer spells as the grammar does not
            break
        spent.append(microseconds)
        state = following
    return spent


def summary(spent: list[float]) -> str:
    """Median, 90th and 99th percentile, the most, and how many there were."""
    if not spent:
        return "none"
    median, late, later = np.percentile(spent, [50, 90, 99])
    return f"{median:.0f} / {late:.0f} / {later:.0f} / {max(spent):.0f} ({len(spent)})"


def other_text(kind: str, grammar: Any, number: int) -> StructuredOutputsParams:
    """A grammar in other words, so that it is compiled again."""
    same = {**grammar, "title": str(number)} if kind == "json" else f"(?:{grammar})" + "(?:)" * number
    return StructuredOutputsParams.of({kind: same})


def measure(num_tokens: int, most: int, table: Table) -> None:
    text = EMBEDDED.read_text(encoding="utf-8") if num_tokens == 0 else bpe(num_tokens)
    tokenizer = tokenizers.Tokenizer.from_str(text)
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
    assert end is not None
    guidance = Guidance(text, size, [end])
    _, reading = timed(lambda: guidance.compile(StructuredOutputsParams(regex="a")))
    for name, (given, instance) in GRAMMARS.items():
        kind, grammar = next(iter(given.items()))
        automata, compiling = [], []
        for number in range(15):
            params = other_text(kind, grammar, number)
            automaton, microseconds = timed(lambda params=params: guidance.compile(params))
            automata.append(automaton)
            compiling.append(microseconds)
        # A walk is drawn with one automaton and measured with another, which has none of its masks yet.
        random_steps = steps(automata[1], drawn(automata[0], end, seed=1, most=most), end)
        spelled = tokenizer.encode(instance, add_special_tokens=False).ids[:most]
        text_steps = steps(automata[2], spelled, end)
        table.add_row(
            f"{size:,}", f"{reading / 1e6:.2f}", name, f"{np.median(compiling) / 1e3:.2f}", summary(random_steps),
            summary(text_steps), f"{np.median(random_steps[-100:]):.0f}",
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[0, 65536, 129280], help="tokens; 0: the embedded ones")
    parser.add_argument("--tokens", type=int, default=1000, help="most tokens of a walk")
    arguments = parser.parse_args()
    table = Table(title="advance and mask, microseconds: median / 90% / 99% / most (steps)")
    for column in ("tokens", "read s", "grammar", "compile ms", "random walk", "text of an instance", "last 100"):
        table.add_column(column, justify="left" if column == "grammar" else "right")
    for num_tokens in arguments.vocab:
        measure(num_tokens, arguments.tokens, table)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
