"""Charts of a result of `bench_gpu.py`: shares of the floor, and branches against lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from gpu_bench.arithmetic import branch_speedups
from gpu_bench.plan import BRANCHES_SPEEDUP, DECODE_SHARE

_OURS, _OTHERS, _LIMIT = "#2a6f97", "#b7b7b7", "#c1121f"
_SHARED_PARTS = ("decode-8b", "decode-0.6b", "prefill")


def draw_charts(result: dict[str, Any], file: Path) -> list[Path]:
    """Write one picture with a panel for everything that has figures; the files that were written.

    Raises:
        ValueError: no row of the result can be drawn.
    """
    shares = [row for row in result["rows"] if row["part"] in _SHARED_PARTS and "share" in row]
    speedups = branch_speedups(result["rows"])
    panels = bool(shares) + bool(speedups)
    if not panels:
        raise ValueError("nothing to draw: no decode, prefill or branches were measured")
    height = max(3.0, 0.3 * len(shares), 0.6 * len(speedups)) + 1.2
    figure, axes = plt.subplots(1, panels, figsize=(7.5 * panels, height), squeeze=False)
    at = iter(axes[0])
    if shares:
        _draw_shares(next(at), shares)
    if speedups:
        _draw_speedups(next(at), speedups)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.text(0.5, 0.01, _caption(result), fontsize=8, ha="center")
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return [file]


def _draw_shares(axis: Any, rows: list[dict[str, Any]]) -> None:
    names = [row["case"] for row in rows][::-1]
    bars = axis.barh(names, [100 * row["share"] for row in rows][::-1], color=_OURS)
    axis.bar_label(bars, labels=[f"{100 * row['share']:.0f}%  {row['ms']:.3g} ms" for row in rows][::-1], padding=2,
                   fontsize=7)  # fmt: skip
    limit = f"asked for at batch 1: {100 * DECODE_SHARE:.0f}%"
    axis.axvline(100 * DECODE_SHARE, color=_LIMIT, linewidth=1, linestyle="--", label=limit)
    axis.legend(fontsize=7, frameon=False, loc="lower right")
    axis.set_xlim(0, 120)
    axis.set_title("share of the floor that this card's measured rates allow", fontsize=10)
    axis.tick_params(axis="y", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_speedups(axis: Any, speedups: dict[str, dict[str, float]]) -> None:
    for offset, kind, label, color in (
        (0.2, "lanes", "lanes of their own", _OURS),
        (-0.2, "shared", "lanes with a common trunk", _OTHERS),
    ):
        places = [index for index, found in enumerate(speedups.values()) if kind in found]
        values = [found[kind] for found in speedups.values() if kind in found]
        bars = axis.barh([place + offset for place in places], values, height=0.38, color=color, label=label)
        axis.bar_label(bars, fmt="%.1fx", padding=2, fontsize=7)
    limit = f"asked for at 8 branches over 8,192: {BRANCHES_SPEEDUP:g}x"
    axis.axvline(BRANCHES_SPEEDUP, color=_LIMIT, linewidth=1, linestyle="--", label=limit)
    axis.set_yticks(range(len(speedups)), [group.replace(" over ", " branches over ") for group in speedups])
    axis.set_title("attention of branches in one lane is faster than of", fontsize=10)
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _caption(result: dict[str, Any]) -> str:
    found = result["environment"] or {}
    words = [(found.get("card") or {}).get("name") or found.get("device") or "unknown device", found.get("date", "")]
    versions = found.get("versions", {})
    words += [f"{name} {versions[name]}" for name in ("jaxinfer", "jax") if name in versions]
    smoke = "SMOKE RUN, no figures of a GPU: " if result["settings"]["smoke"] else ""
    return smoke + ", ".join(filter(None, words))
