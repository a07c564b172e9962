"""Skeleton-of-Thought with and without drafts: steps and time of plans and of their points, by way and branch mode.

All ways answer the same questions by turns and have to give the same texts. With drafts, a step is a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from branching.expansion import FEWEST_POINTS, at_once, steps_so_far
from jaxinfer import LLM, SamplingParams
from jaxinfer.limits import BRANCH_MODES
from jaxinfer.skeleton.answer import SkeletonOfThought

PLAIN = "plain"
WAYS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "chains of 5": {"method": "eagle3", "adaptive": None, "tree_top_k": 1, "tree_depth": 4},
    "trees of 59": {"method": "eagle3", "adaptive": None},
}


def measure_drafting(limits: dict[str, Any], questions: Iterator[str], count: int, pairs: int) -> list[dict[str, Any]]:
    """A row for each way and mode: sums over `count` questions, seconds as medians of the turns that count."""
    engines = {way: LLM(**limits, speculative_config=config) for way, config in WAYS.items()}
    methods = {way: SkeletonOfThought(llm.client) for way, llm in engines.items()}
    params = SamplingParams(temperature=0.0, max_tokens=128)
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    found = 0
    for question in questions:
        if found == count:
            break
        turns: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for turn in range(pairs + 1):
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                llm, method = engines[way], methods[way]
                llm.reset_prefix_cache()
                steps_so_far(llm)
                whole = method.answer(question, params)
                for mode in BRANCH_MODES:
                    points = at_once(llm, method, question, whole.written, mode, params)
                    turns.setdefault((way, mode), []).append(
                        {
                            "plan_steps": whole.metrics.skeleton_steps, "plan_seconds": whole.metrics.skeleton_seconds,
                            "point_steps": points.steps, "point_seconds": points.seconds,
                            "texts": (whole.written, points.token_ids), "num_points": len(whole.points),
                        }
                    )  # fmt: skip
        if turns[PLAIN, BRANCH_MODES[0]][0]["num_points"] < FEWEST_POINTS:
            continue
        found += 1
        reference = turns[PLAIN, BRANCH_MODES[0]][0]["texts"]
        for key, taken in turns.items():
            row = sums.setdefault(key, {"way": key[0], "mode": key[1], "questions": 0, "same": 0})
            row["questions"] += 1
            row["same"] += all(each["texts"] == reference for each in taken)
            for part in ("plan", "point"):
                row[f"{part}_steps"] = row.get(f"{part}_steps", 0) + taken[-1][f"{part}_steps"]
                seconds = statistics.median(each[f"{part}_seconds"] for each in taken[1:])
                row[f"{part}_seconds"] = row.get(f"{part}_seconds", 0.0) + seconds
    return list(sums.values())


def drafting_table(rows: list[dict[str, Any]]) -> Table:
    """Steps, and how many times as long they take as plain decoding in the same mode."""
    plain = {row["mode"]: row for row in rows if row["way"] == PLAIN}
    table = Table(title=f"{rows[0]['questions']} plans", title_justify="left")
    for name in ("way", "branch mode", "steps of plans", "of points", "plans take", "points take", "same texts"):
        table.add_column(name, justify="left" if name in ("way", "branch mode") else "right")
    for row in rows:
        base = plain[row["mode"]]
        shares = [f"{row[f'{part}_seconds'] / base[f'{part}_seconds']:.2f}x" for part in ("plan", "point")]
        table.add_row(
            row["way"], row["mode"], str(row["plan_steps"]), str(row["point_steps"]), *shares,
            f"{row['same']}/{row['questions']}",
        )  # fmt: skip
    return table
