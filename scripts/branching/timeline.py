"""Chart of an answer by Skeleton-of-Thought: which branch decoded in which step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jaxinfer.skeleton.answer import SkeletonEvent, SkeletonOutput

_SKELETON, _POINT, _LINE = "#7a9e3f", "#2a6f97", "#b7b7b7"
_LONGEST_LABEL = 36


def runs_of(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Steps that follow one another, as (first, how many)."""
    runs: list[tuple[int, int]] = []
    for step in sorted(set(steps)):
        if runs and sum(runs[-1]) == step:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((step, 1))
    return runs


def draw_timeline(output: SkeletonOutput, events: Sequence[SkeletonEvent], file: Path) -> None:
    """A bar for each step in which tokens of the skeleton or of a point landed; below, how many of all.

    Steps without tokens are those of prompts, and those that were launched before a result was known.
    """
    labels: dict[int | None, str] = {None: "skeleton"}
    for point in output.points:
        label = f"{point.id}. {point.title}"
        labels[point.id] = label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
    tokens = Counter[int]()
    for event in events:
        tokens[event.step] += event.num_tokens
    figure, (bars, totals) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 1.8 + 0.32 * len(labels)), height_ratios=(len(labels), 3)
    )
    for row, part in enumerate(labels):
        steps = [event.step for event in events if event.point == part and event.num_tokens]
        runs = [(first - 1, count) for first, count in runs_of(steps)]  # a step ends where it is counted
        bars.broken_barh(runs, (row - 0.35, 0.7), color=_SKELETON if part is None else _POINT)
    bars.set_yticks(range(len(labels)), list(labels.values()), fontsize=8)
    bars.set_ylim(len(labels) - 0.5, -0.5)
    metrics = output.metrics
    bars.axvline(metrics.skeleton_steps, color=_LINE, linewidth=1)
    bars.set_title(
        f"{metrics.skeleton_tokens} tokens of the skeleton in {metrics.skeleton_steps} steps, "
        f"{metrics.point_tokens} of {len(output.points)} points in {metrics.point_steps}",
        fontsize=10,
    )
    totals.bar([step - 0.5 for step in tokens], list(tokens.values()), width=1.0, color=_POINT)
    totals.axvline(metrics.skeleton_steps, color=_LINE, linewidth=1)
    totals.set_ylabel("tokens")
    totals.set_xlabel("step of the engine")
    totals.set_xlim(left=0)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
