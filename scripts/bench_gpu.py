"""What this engine does on one NVIDIA GPU, in less than ten minutes, each part in a process of its own.

In this order: what the card can do; the attention kernel's error; decode and prefill on the shapes of Qwen3-8B and
Qwen3-0.6B with random weights, as shares of the card's measured rates; the kernel against cuDNN and plain XLA; Hugging
Face's transformers with the same weights. Rows are printed as they come, and gpu.json and gpu.md are written after
every part. A part that hangs, crashes or finds no time costs its own rows and no others; those say why.

Exit status: 0, or 1 if anything failed (what found no time has not failed), or 2 for bad options or no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_bench.arithmetic import with_floor
from gpu_bench.budget import NO_GPU, Outcome, run_parts, tail
from gpu_bench.plan import Part, parts
from gpu_bench.report import line_of, markdown

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent
# For writing, and for processes that take a moment to be gone.
_SPARE_S = 10.0


def main() -> int:
    args = parse_arguments()
    if args.draw is not None:
        from gpu_bench.charts import draw_charts

        for file in draw_charts(json.loads(args.draw.read_text(encoding="utf-8")), args.draw.with_suffix(".png")):
            print(file)
        return 0
    chosen = [part for part in parts(smoke=args.smoke) if part.name in args.only]
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, (args.output / "gpu.log").open("w", encoding="utf-8") as log:
        record = Record(args.output, {"minutes": args.minutes, "smoke": args.smoke, "parts": args.only})

        def command(part: Part, seconds: float) -> list[str]:
            python = args.torch_python if part.program == "gpu_bench.torch_part" else sys.executable
            smoke = ["--smoke"] if args.smoke else []
            return [
                str(python),
                "-m",
                part.program,
                part.name,
                "--work",
                work,
                "--seconds",
                f"{seconds:.1f}",
                *smoke,
            ]

        path = os.pathsep.join(filter(None, [str(ROOT), str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        for part, outcome in run_parts(
            chosen, command, seconds=60 * args.minutes - _SPARE_S, log=log,
            environment={**os.environ, "PYTHONPATH": path}, on_row=record.add,
        ):  # fmt: skip
            record.finish(part, outcome)
            if outcome.returncode == NO_GPU:
                print(f"error: {outcome.message}; try --smoke, which needs no GPU", file=sys.stderr)
                return 2
            if outcome.status in ("failed", "stopped"):
                print(f"{part.name} {outcome.status}; the end of its log:\n{tail(args.output / 'gpu.log')}")
    print(f"\n{args.output / 'gpu.json'}, {args.output / 'gpu.md'}: {record.verdict()}")
    return 1 if record.failed else 0


class Record:
    """All rows so far, and the files that hold them."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.begin = folder, time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {"settings": settings, "environment": None, "parts": [], "rows": self.rows}

    @property
    def failed(self) -> bool:
        """Whether a part did not end well, or a row has an error."""
        bad = any(part["status"] in ("failed", "stopped") for part in self.result["parts"])
        return bad or any("error" in row for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Keep and print one row; its floor is that of the card as measured so far."""
        if row["case"] == "environment":
            self.result["environment"] = {key: value for key, value in row.items() if key not in ("part", "case")}
            return
        row = with_floor(row, self.rows)
        self.rows.append(row)
        print(f"{row['part']:<12} {line_of(row)}", flush=True)

    def finish(self, part: Part, outcome: Outcome) -> None:
        """Note what became of a part, and write everything down."""
        self.result["parts"].append(
            {"name": part.name, "title": part.title, "status": outcome.status, "seconds": round(outcome.seconds, 1),
             "message": outcome.message}
        )  # fmt: skip
        self.result["seconds"] = round(time.monotonic() - self.begin, 1)
        (self.folder / "gpu.json").write_text(json.dumps(self.result, indent=2) + "\n", encoding="utf-8")
        (self.folder / "gpu.md").write_text(markdown(self.result), encoding="utf-8")

    def verdict(self) -> str:
        """Counts of rows, in words."""
        errors = sum("error" in row for row in self.rows)
        missing = sum("not_run" in row for row in self.rows)
        return f"{len(self.rows) - errors - missing} rows measured, {missing} not run, {errors} failed"


def parse_arguments() -> argparse.Namespace:
    names = [part.name for part in parts(smoke=True)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N", help="in all; default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--smoke", action="store_true", help="try every part on tiny shapes, on any device")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: benchmarks/, with --smoke build/bench_gpu/"
    )
    parser.add_argument(
        "--torch-python", type=Path, default=Path(sys.executable), metavar="PATH",
        help="a Python that has torch and transformers; default: this one",
    )  # fmt: skip
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw the charts of a result beside it, and stop")
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes must be above 0, got {args.minutes}")
    if args.output is None:
        args.output = ROOT / "build" / "bench_gpu" if args.smoke else ROOT / "benchmarks"
    return args


if __name__ == "__main__":
    sys.exit(main())
