"""Tables and chart of `bench_vs_transformers.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

_COLORS = {True: "#2a6f97", False: "#b7b7b7"}


def print_tables(result: dict[str, Any]) -> None:
    """What was measured, the ratios, and whether the tokens are the same."""
    console = Console()
    serving, decode = result.get("serving"), result.get("decode")
    if serving:
        total = serving["requests"]["num_requests"]
        table = Table(title="32 greedy requests, 8-layer 512-wide Qwen3", title_justify="left")
        faster = [f"{engine} is faster by" for engine in serving["ratio"]]
        for heading in ("method", "useful tokens per second", *faster, "same tokens as one by one"):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for name, rate in serving["output_tokens_per_second"].items():
            ratios = [f"{of[name]:.2f}x" if name in of else "" for of in serving["ratio"].values()]
            table.add_row(name, f"{rate:.1f}", *ratios, f"{serving['agreement'][name]['equal']} of {total}")
        console.print(table)
        _print_departures(console, serving)
    if decode:
        table = Table(title="one sequence, shapes of Qwen3-0.6B", title_justify="left")
        for heading in ("method", "decoded tokens per second", "jaxinfer is faster by", "same tokens"):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for name, rate in decode["decode_tokens_per_second"].items():
            ratio = "" if name == "jaxinfer" else f"{decode['ratio']:.2f}x"
            table.add_row(name, f"{rate:.2f}", ratio, "yes" if decode["agreement"][name]["equal"] else "no")
        console.print(table)
        _print_departures(console, decode)


def _print_departures(console: Console, part: dict[str, Any]) -> None:
    console.print(f"smallest lead of a best logit over the second: {part['smallest_margin']:.2g}")
    for name, found in part["agreement"].items():
        for departure in found["departures"]:
            margin = departure["margin"]
            lead = "its length differs" if margin is None else f"the best logit leads by {margin:.2g} there"
            console.print(f"{name}: request {departure['request']} departs at token {departure['position']}: {lead}")


def draw_chart(result: dict[str, Any], file: Path) -> None:
    """A bar for each method; a panel for each comparison that was made."""
    panels = []
    if "serving" in result:
        panels.append(("32 requests of 16 to 128 tokens in and out\n8-layer, 512-wide Qwen3",
                       result["serving"]["output_tokens_per_second"]))  # fmt: skip
    if "decode" in result:
        panels.append(("one sequence\nshapes of Qwen3-0.6B", result["decode"]["decode_tokens_per_second"]))
    widths = [len(rates) + 1 for _, rates in panels]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1.3 * sum(widths) + 2, 4.2), width_ratios=widths, squeeze=False
    )
    for axis, (title, rates) in zip(axes[0], panels, strict=True):
        names = [name.replace(", ", "\n").replace(" continuous", "\ncontinuous") for name in rates]
        bars = axis.bar(names, list(rates.values()), color=[_COLORS[name.startswith("jaxinfer")] for name in rates])
        axis.bar_label(bars, fmt="%.0f" if max(rates.values()) > 20 else "%.1f", padding=2)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("output tokens per second")
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    versions = result["environment"]["versions"]
    peer = next(result[part]["transformers"]["versions"] for part in ("serving", "decode") if part in result)
    figure.suptitle(
        f"{result['environment']['device']}, float32; jax {versions['jax']}, torch {peer['torch']}, "
        f"transformers {peer['transformers']}",
        fontsize=8, y=0.02,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(file, dpi=110)
    plt.close(figure)
