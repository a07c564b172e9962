"""How much of draft trees is accepted, by depth, on the embedded checkpoints and held-out prompts.

Trees are of the published sizes, with the target's noise and without it; chains as deep. All are always drafted whole,
and tokens have to be those of plain decoding. `at n` is the share of rounds in which n or more were accepted.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.environment import describe_environment
from jaxinfer.strategies import eagle3
from training.corpus import stream

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
TEMPERATURES = (0.0, 0.8)
MAX_TOKENS = 128
WITHOUT_NOISE = "trees without noise"
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "trees": {"method": "eagle3", "adaptive": None},
    WITHOUT_NOISE: {"method": "eagle3", "adaptive": None},
    "chains": {"method": "eagle3", "adaptive": None, "tree_top_k": 1},
}


def open_engine(way: str) -> LLM:
    config = WAYS[way]
    if config is None:
        return LLM(**LIMITS)
    drafting = partial(eagle3.Eagle3, noise=0.0) if way == WITHOUT_NOISE else eagle3.Eagle3
    with patch.object(eagle3, "Eagle3", drafting):
        return LLM(**LIMITS, speculative_config=config)


def measure(way: str, prompts: list[Any], expected: dict[float, list[list[int]]]) -> list[dict[str, Any]]:
    """A row for each temperature; the first way leaves its tokens in `expected`."""
    llm = open_engine(way)
    rows = []
    for temperature in TEMPERATURES:
        before = llm.get_metrics()
        steps, rounds, accepted = before.num_steps_total, before.spec_decode_num_drafts, _by_depth(llm)
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=MAX_TOKENS) for i in range(len(prompts))]
        outputs = llm.chat(prompts, params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        same = sum(a == b for a, b in zip(tokens, expected.setdefault(temperature, tokens), strict=True))
        after = llm.get_metrics()
        rounds = after.spec_decode_num_drafts - rounds
        found = [now - then for now, then in itertools.zip_longest(_by_depth(llm), accepted, fillvalue=0)]
        rows.append(
            {
                "way": way, "temperature": temperature, "steps": after.num_steps_total - steps, "rounds": rounds,
                "tokens_a_round": 1 + sum(found) / rounds if rounds else 1.0,
                "share_at_depth": [count / rounds for count in found] if rounds else [],
                "same": same, "prompts": len(prompts),
            }
        )  # fmt: skip
    return rows


def _by_depth(llm: LLM) -> list[int]:
    return list(llm.get_metrics().spec_decode_num_accepted_tokens_per_pos)


def table_of(rows: list[dict[str, Any]]) -> Table:
    depths = max(len(row["share_at_depth"]) for row in rows)
    table = Table(title=f"accepted drafts of {rows[0]['prompts']} held-out prompts", title_justify="left")
    table.add_column("way")
    for name in ("temperature", "steps", "tokens a round", *(f"at {depth + 1}" for depth in range(depths)), "same"):
        table.add_column(name, justify="right")
    for row in rows:
        shares = [f"{share:.2f}" for share in row["share_at_depth"]]
        table.add_row(
            row["way"], f"{row['temperature']:g}", str(row["steps"]), f"{row['tokens_a_round']:.2f}",
            *shares, *[""] * (depths - len(shares)), f"{row['same']}/{row['prompts']}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24, help="how many (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    options = parser.parse_args()
    prompts = [
        sample.prompt for sample in itertools.islice((s for s in stream(9, True) if s.messages), options.prompts)
    ]
    expected: dict[float, list[list[int]]] = {}
    rows = [row for way in WAYS for row in measure(way, prompts, expected)]
    Console(width=120).print(table_of(rows))
    if options.json is not None:
        report = {"environment": describe_environment(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if any(row["same"] < row["prompts"] for row in rows):
        raise SystemExit("tokens differ between ways")


if __name__ == "__main__":
    main()
