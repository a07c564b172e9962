"""The points of plans written at once, and the same points written one after the other.

Both answer the same prompts with the same parameters, so their tokens have to be the same. Before each, the prefix
cache is emptied: at once, what the points share is computed as their trunk; one after the other, it is computed with
the first point and found in the cache by the others. Nothing is streamed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from jaxinfer import LLM, SamplingParams
from jaxinfer.limits import BRANCH_MODES
from jaxinfer.skeleton.answer import SkeletonOfThought
from training.corpus import held_out_cases

FEWEST_POINTS = 4
_CASES_FOR_A_QUESTION = 4  # some have fewer points, or get a plan with fewer


@dataclass(frozen=True)
class Taken:
    """What it took to write something."""

    token_ids: list[list[int]]  # of each point, in the order of the plan
    steps: int
    seconds: float


def planning_questions(count: int) -> Iterator[str]:
    """Held-out questions whose plans should have at least `FEWEST_POINTS` points: for `count` of them, some to spare,
    because a model may plan fewer."""
    for case in held_out_cases("plan", _CASES_FOR_A_QUESTION * count):
        if case.skeleton is not None and len(case.skeleton.points) >= FEWEST_POINTS:
            yield case.prompt[-1]["content"]


def steps_so_far(llm: LLM) -> int:
    """Steps of the engine, those that were launched ahead of a request's end among them."""
    if not llm.has_unfinished_requests():
        llm.core.step()
    return llm.get_metrics().num_steps_total


def at_once(
    llm: LLM, method: SkeletonOfThought, question: str, written: str, mode: str, params: SamplingParams
) -> Taken:
    """Expand a skeleton by branches."""
    llm.reset_prefix_cache()
    before, begin = steps_so_far(llm), time.perf_counter()
    output = method.answer(question, params, branch_mode=mode, skeleton=written)
    seconds = time.perf_counter() - begin
    return Taken([point.token_ids for point in output.points], steps_so_far(llm) - before, seconds)


def one_after_the_other(
    llm: LLM, method: SkeletonOfThought, question: str, written: str, params: SamplingParams
) -> Taken:
    """Expand a skeleton by a conversation for each point."""
    llm.reset_prefix_cache()
    before, begin = steps_so_far(llm), time.perf_counter()
    found = method.prompts.parse(written, params.max_tokens or 1)
    of_points = method.params_of_points(params)
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    for point in (point for wave in found.waves() for point in wave):
        messages = method.prompts.ask_point(question, written, found, point, texts)
        [output] = llm.chat(messages, of_points, use_tqdm=False)
        texts[point.id], tokens[point.id] = output.outputs[0].text, output.outputs[0].token_ids
    found.merge(texts)
    seconds = time.perf_counter() - begin
    return Taken([tokens[point.id] for point in found.points], steps_so_far(llm) - before, seconds)


def compare_question(
    llm: LLM, method: SkeletonOfThought, question: str, params: SamplingParams, pairs: int
) -> dict[str, Any] | None:
    """One plan, expanded in all ways by turns, the first turn not counted; None: it has too few points."""
    for _ in range(2):  # the first one compiles
        llm.reset_prefix_cache()
        steps_so_far(llm)
        whole = method.answer(question, params)
    if len(whole.points) < FEWEST_POINTS:
        return None
    turns: list[tuple[Taken, dict[str, Taken]]] = []
    for turn in range(pairs + 1):
        modes = BRANCH_MODES if turn % 2 else BRANCH_MODES[::-1]
        reference = one_after_the_other(llm, method, question, whole.written, params)
        turns.append((reference, {mode: at_once(llm, method, question, whole.written, mode, params) for mode in modes}))
    counted = turns[1:]
    skeleton = {"steps": whole.metrics.skeleton_steps, "seconds": whole.metrics.skeleton_seconds}
    return {
        "question": question,
        "points": len(whole.points),
        "tokens": whole.metrics.point_tokens,
        "skeleton": skeleton,
        "one_after_the_other": {
            "steps": counted[0][0].steps,
            "seconds": [reference.seconds for reference, _ in counted],
        },
        "at_once": {
            mode: {
                "steps": counted[0][1][mode].steps,
                "seconds": [taken[mode].seconds for _, taken in counted],
                "same_tokens": all(taken[mode].token_ids == reference.token_ids for reference, taken in turns),
            }
            for mode in BRANCH_MODES
        },
    }


def compare(
    llm: LLM, method: SkeletonOfThought, questions: Iterator[str], count: int, params: SamplingParams, pairs: int
) -> Iterator[dict[str, Any]]:
    """Rows for the first `count` questions that get a plan with enough points."""
    found = 0
    for question in questions:
        row = compare_question(llm, method, question, params, pairs)
        if row is not None:
            found += 1
            yield row
        if found == count:
            return
    raise ValueError(f"only {found} held-out questions got a plan with {FEWEST_POINTS} points, {count} were asked for")


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By mode: how many times fewer steps, of all questions together, and how many times less time, as medians of the
    pairs; `whole` has the time and the steps of the skeleton on both sides."""
    modes: dict[str, dict[str, Any]] = {}
    alone = sum(row["one_after_the_other"]["steps"] for row in rows)
    skeletons = sum(row["skeleton"]["steps"] for row in rows)
    for mode in BRANCH_MODES:
        together = sum(row["at_once"][mode]["steps"] for row in rows)
        pairs = [
            (row["skeleton"]["seconds"], *seconds)
            for row in rows
            for seconds in zip(row["one_after_the_other"]["seconds"], row["at_once"][mode]["seconds"], strict=True)
        ]
        modes[mode] = {
            "steps_one_after_the_other": alone,
            "steps_at_once": together,
            "skeleton_steps": skeletons,
            "fewer_steps": alone / together,
            "fewer_steps_whole": (skeletons + alone) / (skeletons + together),
            "less_time": statistics.median(slow / fast for _, slow, fast in pairs),
            "less_time_whole": statistics.median((plan + slow) / (plan + fast) for plan, slow, fast in pairs),
            "same_tokens": sum(row["at_once"][mode]["same_tokens"] for row in rows),
        }
    return modes


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What `summarise` found."""
    points = sum(row["points"] for row in rows)
    table = Table(title=f"{len(rows)} plans with {points} points", title_justify="left")
    for heading in (
        "branch mode", "steps in turn", "steps at once", "fewer steps", "fewer with the plan", "less time",
        "less with the plan", "same tokens",
    ):  # fmt: skip
        left = heading == "branch mode"
        table.add_column(heading, justify="left" if left else "right", no_wrap=left)
    for mode, found in summarise(rows).items():
        ratios = [found[name] for name in ("fewer_steps", "fewer_steps_whole", "less_time", "less_time_whole")]
        table.add_row(
            mode, f"{found['steps_one_after_the_other']}", f"{found['steps_at_once']}",
            *(f"{ratio:.2f}x" for ratio in ratios), f"{found['same_tokens']}/{len(rows)}",
        )  # fmt: skip
    return table
