"""What the GPU benchmark writes, from invented figures: tables of what was found and what was not, charts, files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench_gpu import Record
from gpu_bench.budget import Outcome
from gpu_bench.charts import draw_charts
from gpu_bench.plan import parts
from gpu_bench.report import line_of, markdown, table

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "date": "2000-01-01", "device": "a device", "versions": {"jax": "0.0"},
    "card": {"name": "a card", "driver_version": "1.2", "memory.total": "3 MiB"},
}  # fmt: skip
BRANCH = {"part": "branches", "implementation": "kernel", "group": "8 over 8192"}
ROWS = [
    {"part": "card", "case": "read bandwidth", "bytes_per_second": 2e12, "ms": 1.0, "form": "sum"},
    {"part": "check", "case": "decode", "relative_error": 3e-3, "seed": 1},
    {"part": "check", "case": "tree", "relative_error": 4e-3, "seed": 2},
    {"part": "decode-8b", "case": "loop", "model": "Qwen3-8B", "batch": 1, "context": 1024, "launch": "loop", "ms": 5.0,
     "floor_ms": 4.0, "share": 0.8, "tokens_per_second": 200.0, "first_call_s": 9.0, "attention": "pallas"},
    {"part": "decode-8b", "case": "late", "model": "Qwen3-8B", "batch": 8, "context": 1024, "launch": "loop",
     "not_run": "3 s were left"},
    BRANCH | {"case": "a", "shape": "8, one lane", "kind": "branches", "ms": 0.02, "floor_ms": 0.01, "share": 0.5},
    BRANCH | {"case": "b", "shape": "8, lanes", "kind": "lanes", "ms": 0.1},
    {"part": "branches", "case": "c", "shape": "8, one lane", "kind": "branches", "implementation": "cudnn",
     "error": "ValueError: a | b"},
    {"part": "transformers", "case": "peer", "model": "Qwen3-8B", "batch": 1, "context": 1024, "ms": 15.0,
     "tokens_per_second": 66.0, "first_call_s": 30.0, "logits_difference": 0.01},
]  # fmt: skip


def result(rows=ROWS, smoke=False):
    chosen = parts(smoke=True)
    return {
        "settings": {"minutes": 9.0, "smoke": smoke}, "environment": ENVIRONMENT, "seconds": 300.0, "rows": rows,
        "parts": [{"name": part.name, "title": part.title, "status": "done", "message": ""} for part in chosen],
    }  # fmt: skip


def cells(text, first):
    """The cells of the table row that begins with `first`."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_holds_what_was_asked_for_against_what_was_found():
    text = markdown(result())
    assert cells(text, "largest error of the kernel against float32") == [
        "largest error of the kernel against float32", "0.01", "4.00e-03"
    ]  # fmt: skip
    assert cells(text, "decode at batch 1, shapes of Qwen3-8B, share of the measured bandwidth")[2] == "80%"
    assert cells(text, "8 branches over 8,192 tokens against 8 lanes of their own")[1:] == ["4x", "5.0x"]
    assert cells(text, "attention of a prefill, share of the measured matmul rate")[2] == "not measured"


def test_the_page_says_where_and_when():
    text = markdown(result())
    assert "2000-01-01. a card; driver 1.2, 3 MiB; jax 0.0. 5.0 minutes of 9." in text


def test_a_kernel_that_failed_its_check_is_not_hidden_behind_those_that_passed():
    failed = {"part": "check", "case": "mixed", "error": "RuntimeError: the relative error is 0.5"}
    assert "its times are worth nothing" in markdown(result([*ROWS, failed]))
    assert "its times are worth nothing" not in markdown(result())
    assert cells(markdown(result([*ROWS, failed])), "largest error of the kernel against float32")[2].startswith(
        "FAILED"
    )


def test_every_part_has_a_table_and_every_row_is_in_one():
    text = markdown(result())
    for part in parts(smoke=True):
        assert f"## {part.title}" in text
    assert cells(text, "loop") == ["loop", "5.000", "4.000", "80%", "200", "9.0", "pallas"]
    assert cells(text, "late")[1] == "not run: 3 s were left"
    assert cells(text, "8, one lane") == ["8, one lane", "20.0", "-", "", "10.0", "50%"]
    assert "- 8, one lane: cudnn: FAILED: ValueError: a | b" in text
    assert cells(text, "peer")[-2:] == ["30.0", "1.00e-02"]


def test_the_ratios_stand_in_tables_of_their_own():
    text = markdown(result())
    assert cells(text, "8 branches over 8192 tokens") == ["8 branches over 8192 tokens", "5.0x", ""]
    assert text.split("## Against transformers")[1].splitlines()[-1] == "| peer | 15.00 | 5.00 | 3.00x |"
    assert "Against transformers" not in markdown(result(ROWS[:3]))


def test_a_part_that_was_stopped_says_so():
    stopped = result()
    stopped["parts"][2] |= {"status": "stopped", "message": "the part was stopped after 130 s"}
    assert "This part: stopped; the part was stopped after 130 s" in markdown(stopped)


def test_a_smoke_run_cannot_be_taken_for_a_result():
    assert markdown(result(smoke=True)).startswith("# A smoke run: tiny shapes, no figures of a GPU\n")


def test_a_page_can_be_made_of_nothing():
    empty = result([]) | {"environment": None, "parts": []}
    assert "not measured" in markdown(empty)


def test_a_table_keeps_its_columns_whatever_a_cell_holds():
    assert table(("a", "b"), [("x | y", "1")]) == ["| a | b |", "|---|---:|", "| x / y | 1 |"]


def test_a_line_is_short_and_tells_floor_and_share():
    assert line_of(ROWS[3]) == "loop: 5 ms, floor 4 ms, 80%"
    assert line_of(ROWS[0]) == "read bandwidth: 2.00 TB/s"


def test_charts_are_drawn_of_what_was_measured(tmp_path):
    assert draw_charts(result(), tmp_path / "gpu.png") == [tmp_path / "gpu.png"]
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert draw_charts(result(ROWS[:4]), tmp_path / "one.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_charts(result(ROWS[:3]), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_record_is_written_after_every_part_and_knows_whether_something_failed(tmp_path, capsys):
    record = Record(tmp_path, {"minutes": 9.0, "smoke": True})
    card, check = parts(smoke=True)[:2]
    record.add({"part": "card", "case": "environment"} | ENVIRONMENT)
    record.add(ROWS[0])
    record.add(
        {
            "part": "attention",
            "case": "a",
            "shape": "s",
            "implementation": "xla",
            "kind": "tree",
            "ms": 4.0,
            "bytes": 4e9,
        }
    )
    record.finish(card, Outcome("done", []))
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["environment"] == ENVIRONMENT
    assert written["rows"][1]["share"] == 0.5
    assert "a: 4 ms, floor 2 ms, 50%" in capsys.readouterr().out
    assert not record.failed
    record.add({"part": "check", "case": "b", "not_run": "no time"})
    record.finish(check, Outcome("not run", []))
    assert not record.failed and record.verdict() == "2 rows measured, 1 not run, 0 failed"
    record.finish(check, Outcome("stopped", [], message="late"))
    assert record.failed and "stopped; late" in (tmp_path / "gpu.md").read_text()


def bench(*options):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_gpu.py", *map(str, options)], capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip


def test_without_a_gpu_the_command_ends_with_a_line_that_says_so(tmp_path):
    ended = bench("--only", "card", "--output", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and "try --smoke" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_smoke_run_writes_json_and_a_page(tmp_path):
    ended = bench("--smoke", "--only", "card", "--output", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["case"] for row in written["rows"]] == ["read bandwidth", "copy bandwidth", "bf16 matmul"]
    assert written["environment"]["versions"]["jax"] and written["settings"]["smoke"]
    assert (tmp_path / "gpu.md").read_text().startswith("# A smoke run")


@pytest.mark.slow
def test_a_smoke_run_goes_through_every_part(tmp_path):
    ended = bench("--smoke", "--output", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["status"] for part in written["parts"]] == ["done"] * len(parts(smoke=True))
    for name in ("check", "decode-8b", "decode-0.6b", "prefill", "branches", "attention", "decode-xla"):
        assert any("ms" in row or "relative_error" in row for row in written["rows"] if row["part"] == name), name
