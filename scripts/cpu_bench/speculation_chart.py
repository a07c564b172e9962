"""Chart of `bench_speculative.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLORS = {"ngram": "#7a9e3f", "draft_model": "#2a6f97", "eagle3": "#c8553d"}


def draw_chart(rows: list[dict[str, Any]], file: Path) -> None:
    """A panel for each temperature, a line for each method: speed-up over the batch."""
    temperatures = sorted({row["temperature"] for row in rows})
    figure, panels = plt.subplots(1, len(temperatures), figsize=(4.5 * len(temperatures), 3.2), sharey=True)
    for panel, temperature in zip([panels] if len(temperatures) == 1 else panels, temperatures, strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [row for row in rows if row["method"] == method and row["temperature"] == temperature]
            batches = [row["batch"] for row in own]
            panel.plot(batches, [row["speed_up"] for row in own], marker="o", label=method, color=_COLORS[method])
        panel.axhline(1.0, color="#b7b7b7", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set_xlabel("requests at once")
        panel.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}", fontsize=10)
    first = panels if len(temperatures) == 1 else panels[0]
    first.set_ylabel("times as fast as plain decoding")
    first.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
