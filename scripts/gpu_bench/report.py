"""The result of `bench_gpu.py` in words: a line for a row, and a markdown page with every table. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpu_bench.arithmetic import branch_speedups
from gpu_bench.plan import BRANCHES_SPEEDUP, DECODE_AIM, DECODE_SHARE, LARGEST_ERROR, PREFILL_ATTENTION_SHARE

Row = dict[str, Any]
_IMPLEMENTATIONS = ("kernel", "cudnn", "xla")


def line_of(row: Row) -> str:
    """One row, for a terminal."""
    return f"{row['case']}: {figures(row)}"


def figures(row: Row) -> str:
    """What a row found, or why it found nothing."""
    if "error" in row:
        return f"FAILED: {row['error']}"
    if "not_run" in row:
        return f"not run: {row['not_run']}"
    words = []
    if "bytes_per_second" in row:
        words.append(f"{row['bytes_per_second'] / 1e12:.2f} TB/s")
    if "flops_per_second" in row:
        words.append(f"{row['flops_per_second'] / 1e12:.0f} TFLOP/s")
    if "relative_error" in row:
        words.append(f"relative error {row['relative_error']:.2e}")
    if "ms" in row and not words:
        words.append(f"{row['ms']:.4g} ms")
    if "share" in row:
        words.append(f"floor {row['floor_ms']:.4g} ms, {100 * row['share']:.0f}%")
    return ", ".join(words)


def markdown(result: dict[str, Any]) -> str:
    """The page: where it was measured, the numbers that were asked for, a table for each part."""
    rows = result["rows"]
    title = "# One GPU" if not result["settings"]["smoke"] else "# A smoke run: tiny shapes, no figures of a GPU"
    lines = [title, "", *_environment(result), "", *_asked_for(rows), ""]
    if kernel_failed(rows):
        lines += ["**The attention kernel failed its check: its times are worth nothing.**", ""]
    for part in result["parts"]:
        own = [row for row in rows if row["part"] == part["name"]]
        lines += [f"## {part['title']}", ""]
        if part["status"] != "done":
            lines += [f"This part: {part['status']}; {part['message']}", ""]
        lines += [*_table_of(part["name"], own), ""]
    for last in (branches_table(rows), transformers_table(rows)):
        lines += [*last, ""] if last else []
    return "\n".join(lines).rstrip() + "\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table; the first column is text, the others are numbers."""
    rule = "|---|" + "---:|" * (len(headings) - 1)
    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    return [f"| {' | '.join(headings)} |", rule, *(f"| {' | '.join(row)} |" for row in cells)]


def _environment(result: dict[str, Any]) -> list[str]:
    found = result["environment"]
    if found is None:
        return ["The card was not described: see the part *The card*."]
    card = found.get("card") or {}
    words = [card.get("name") or found["device"]]
    if card:
        words.append(f"driver {card['driver_version']}, {card['memory.total']}")
    words.append(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    minutes = f"{result.get('seconds', 0) / 60:.1f} minutes of {result['settings']['minutes']:g}"
    return [f"{found['date']}. {'; '.join(words)}. {minutes}."]


def _asked_for(rows: list[Row]) -> list[str]:
    """The issue's numbers against what was found; "not measured" is an answer."""
    errors = [row["relative_error"] for row in rows if "relative_error" in row]
    failed = kernel_failed(rows)
    decode = _share(rows, lambda row: row["part"] == "decode-8b" and (row["batch"], row["context"]) == (1, 1024))
    prefill = _share(rows, lambda row: row["part"] == "attention" and row["kind"] == "prefill" and _is_kernel(row))
    speedup = branch_speedups(rows).get("8 over 8192", {})
    return table(
        ("asked for", "limit", "found"),
        [
            ("largest error of the kernel against float32", f"{LARGEST_ERROR:g}",
             "FAILED, see below" if failed else f"{max(errors):.2e}" if errors else "not measured"),
            ("decode at batch 1, shapes of Qwen3-8B, share of the measured bandwidth",
             f"{100 * DECODE_SHARE:.0f}%, aim {100 * DECODE_AIM:.0f}%", decode),
            ("8 branches over 8,192 tokens against 8 lanes of their own", f"{BRANCHES_SPEEDUP:g}x",
             f"{speedup['lanes']:.1f}x" if "lanes" in speedup else "not measured"),
            ("attention of a prefill, share of the measured matmul rate", f"{100 * PREFILL_ATTENTION_SHARE:.0f}%",
             prefill),
        ],
    )  # fmt: skip


def kernel_failed(rows: list[Row]) -> bool:
    """Whether the kernel was wrong, or died, in any case of its check."""
    return any(row["part"] == "check" and "error" in row for row in rows)


def _is_kernel(row: Row) -> bool:
    return row.get("implementation") == "kernel"


def _share(rows: list[Row], wanted: Callable[[Row], bool]) -> str:
    shares = [row["share"] for row in rows if "share" in row and wanted(row)]
    return f"{100 * max(shares):.0f}%" if shares else "not measured"


def _table_of(part: str, rows: list[Row]) -> list[str]:
    if part in ("attention", "branches"):
        return _by_implementation(rows)
    if part == "card":
        return table(("what", "found", "form"), [(row["case"], figures(row), row.get("form", "")) for row in rows])
    if part == "check":
        return table(("case", "found", "seed"), [(row["case"], figures(row), str(row.get("seed", ""))) for row in rows])
    last = "logits differ by" if part == "transformers" else "attention"
    return table(
        ("case", "ms", "floor, ms", "share", "tokens per second", "first call, s", last),
        [(row["case"], *_cells(row), _last_cell(part, row)) for row in rows],
    )


def _cells(row: Row) -> tuple[str, ...]:
    if "ms" not in row:
        return (figures(row), "", "", "", "")
    return (f"{row['ms']:.3f}", *_floor_cells(row), f"{row['tokens_per_second']:,.0f}", f"{row['first_call_s']:.1f}")


def _floor_cells(row: Row) -> tuple[str, str]:
    return (f"{row['floor_ms']:.3f}", f"{100 * row['share']:.0f}%") if "share" in row else ("", "")


def _last_cell(part: str, row: Row) -> str:
    if part != "transformers":
        return str(row.get("attention", ""))
    difference = row.get("logits_difference")
    return "" if difference is None else f"{difference:.2e}"


def _by_implementation(rows: list[Row]) -> list[str]:
    """A line for each shape: microseconds of every implementation, and the kernel's share of the floor."""
    by_shape: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_shape.setdefault(row["shape"], {})[row["implementation"]] = row
    lines, reasons = [], []
    for shape, found in by_shape.items():
        cells = []
        for name in _IMPLEMENTATIONS:
            row = found.get(name)
            cells.append("" if row is None else f"{1e3 * row['ms']:.1f}" if "ms" in row else "-")
            if row is not None and "ms" not in row:
                reasons.append(f"- {shape}: {name}: {figures(row)}")
        kernel = found.get("kernel", {})
        floor = (f"{1e3 * kernel['floor_ms']:.1f}", f"{100 * kernel['share']:.0f}%") if "share" in kernel else ("", "")
        lines.append((shape, *cells, *floor))
    headings = ("microseconds a layer", "kernel", "cuDNN", "plain XLA", "floor", "kernel's share")
    return [*table(headings, lines), *(["", *_merged(reasons)] if reasons else [])]


def _merged(reasons: list[str]) -> list[str]:
    """At most ten lines of what has no time."""
    return reasons if len(reasons) <= 10 else [*reasons[:9], f"- and {len(reasons) - 9} more, see the JSON file"]


def branches_table(rows: list[Row]) -> list[str]:
    """By how much one lane with branches is faster than lanes; nothing if that was not measured."""
    speedups = branch_speedups(rows)
    if not speedups:
        return []
    lines = [
        (f"{group.replace(' over ', ' branches over ')} tokens",
         *(f"{found[kind]:.1f}x" if kind in found else "" for kind in ("lanes", "shared")))
        for group, found in speedups.items()
    ]  # fmt: skip
    headings = ("one lane with branches is faster than", "lanes of their own", "lanes with a common trunk")
    return ["## Branches against lanes", "", *table(headings, lines)]


def transformers_table(rows: list[Row]) -> list[str]:
    """By how much a decode step of this engine is faster than `generate`'s; nothing if either was not measured."""
    ours = {
        (row["model"], row["batch"], row["context"]): row["ms"]
        for row in rows
        if row["part"] in ("decode-8b", "decode-0.6b") and row["launch"] == "loop" and "ms" in row
    }
    lines = []
    for row in rows:
        if row["part"] == "transformers" and "ms" in row:
            own = ours.get((row["model"], row["batch"], row["context"]))
            if own is not None:
                lines.append((row["case"], f"{row['ms']:.2f}", f"{own:.2f}", f"{row['ms'] / own:.2f}x"))
    if not lines:
        return []
    headings = ("transformers' `generate`", "its ms a step", "ms of this engine's loop", "this engine is faster by")
    return ["## Against transformers", "", *table(headings, lines)]
