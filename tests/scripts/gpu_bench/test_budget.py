"""Parts of the GPU benchmark in processes of their own: what one costs the others when it hangs, crashes or is late."""

import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_bench.budget import allot, run_part, run_parts
from gpu_bench.part import run_cases
from gpu_bench.plan import NotRun, Part, parts

NAMES = ("first", "second", "third")


@pytest.fixture(autouse=True)
def nothing_to_collect(monkeypatch):
    """A process that runs tests holds so much that looking through it after every case would take seconds."""
    monkeypatch.setattr("gpu_bench.part.gc", SimpleNamespace(collect=lambda: 0))


def part(name="part", least_s=1.0, most_s=5.0):
    return Part(name, "A part", "room.program", least_s, most_s, tuple({"case": case} for case in NAMES))


def row(name, **figures):
    return f"print({json.dumps({'case': name} | figures)!r}, flush=True)"


@pytest.fixture
def run(tmp_path):
    """(lines of Python, seconds) -> outcome, all rows in the order in which they came, and the log's text."""

    def start(*lines, seconds=20.0):
        seen = []
        with (tmp_path / "log").open("w") as log:
            outcome = run_part(
                part(), [sys.executable, "-c", "\n".join(lines)], seconds, log=log, environment=dict(os.environ),
                on_row=seen.append,
            )  # fmt: skip
        return outcome, seen, (tmp_path / "log").read_text()

    return start


def test_rows_are_told_as_they_come_and_belong_to_their_part(run):
    outcome, seen, _ = run(*(row(name, ms=1.5) for name in NAMES))
    assert outcome.status == "done" and outcome.returncode == 0
    assert seen == outcome.rows == [{"part": "part", "case": name, "ms": 1.5} for name in NAMES]


def test_a_part_that_hangs_is_stopped_and_keeps_what_it_had_found(run):
    begin = time.monotonic()
    outcome, seen, _ = run(row("first", ms=1.0), "import time; time.sleep(60)", seconds=3.0)
    assert time.monotonic() - begin < 30
    assert outcome.status == "stopped" and outcome.rows == seen
    assert seen[0]["ms"] == 1.0
    assert [entry["not_run"] for entry in seen[1:]] == ["the part was stopped after 3 s"] * 2


def test_a_process_that_closes_its_output_and_stays_is_stopped_too(run):
    outcome, _, _ = run("import os, time; os.close(1); time.sleep(60)", seconds=3.0)
    assert outcome.status == "stopped"


def test_what_a_part_has_started_ends_with_it_and_is_not_waited_for(run, tmp_path):
    file = tmp_path / "pid"
    sleeper = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    outcome, _, _ = run(
        "import subprocess, sys, time, os",
        f"subprocess.Popen([sys.executable, '-c', {sleeper!r}])",
        f"while not (os.path.exists({str(file)!r}) and open({str(file)!r}).read()): time.sleep(0.01)",
        seconds=60.0,
    )
    assert outcome.status == "failed"  # for want of rows; "stopped" if it had been waited for
    pid = int(file.read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # dead, and not yet collected by its new parent
            return
        time.sleep(0.05)
    raise AssertionError("the process still runs")


def test_a_part_that_raises_fails_with_its_last_words(run):
    outcome, seen, log = run(row("first", ms=1.0), "raise MemoryError('the card is full')")
    assert outcome.status == "failed" and outcome.returncode == 1
    assert "ms" in seen[0]
    assert all("the card is full" in entry["error"] and "status 1" in entry["error"] for entry in seen[1:])
    assert "Traceback" in log and "the card is full" in outcome.message


def test_a_part_that_dies_of_a_signal_fails(run):
    outcome, seen, _ = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert outcome.status == "failed" and all("status -11" in entry["error"] for entry in seen)


def test_a_case_that_says_its_error_makes_the_part_fail_and_no_other_case(run):
    outcome, seen, _ = run(row("first", error="ValueError: no"), row("second", ms=1.0), row("third", not_run="too old"))
    assert outcome.status == "failed" and outcome.message == "ValueError: no"
    assert [len(entry) for entry in seen] == [3, 3, 3]


def test_a_case_without_a_word_is_an_error(run):
    outcome, seen, _ = run(row("second", ms=1.0))
    assert outcome.status == "failed"
    assert [entry["case"] for entry in seen if "error" in entry] == ["first", "third"]


def test_what_is_no_row_goes_to_the_log(run):
    outcome, seen, log = run("print('hello'); print('[1]'); print('{}')", *(row(name, ms=1.0) for name in NAMES))
    assert outcome.status == "done" and len(seen) == 3
    assert all(line in log.splitlines() for line in ("hello", "[1]", "{}"))


def test_a_part_gets_what_it_may_take_as_long_as_later_ones_keep_their_least():
    first, later = part(least_s=10, most_s=100), [part(least_s=20), part(least_s=30)]
    assert allot(first, later, remaining_s=500) == 100
    assert allot(first, later, remaining_s=120) == 70
    # An earlier part's least goes first.
    assert allot(first, later, remaining_s=40) == 10
    assert allot(first, later, remaining_s=10) == 10
    assert allot(first, later, remaining_s=9) == 0


def test_parts_that_found_no_time_are_rows_that_say_so(tmp_path):
    ok = "; ".join(row(name, ms=1.0) for name in NAMES)
    chosen = [part("a", 5, 30), part("b", 100, 200), part("c", 5, 30)]
    seen, given = [], {}

    def command(part, seconds):
        given[part.name] = seconds
        return [sys.executable, "-c", ok]

    with (tmp_path / "log").open("w") as log:
        ended = list(run_parts(chosen, command, seconds=60, log=log, environment=dict(os.environ), on_row=seen.append))
    assert [(of.name, outcome.status) for of, outcome in ended] == [("a", "done"), ("b", "not run"), ("c", "done")]
    assert given["a"] == 5 and 20 < given["c"] <= 30
    late = [entry for entry in seen if entry["part"] == "b"]
    assert len(late) == 3 and all("it needs 100 s" in entry["not_run"] for entry in late)


def rows_of(cases, measure, **options):
    out = io.StringIO()
    run_cases(tuple({"case": name} for name in cases), measure, out, **{"deadline": time.monotonic() + 60} | options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_case_that_raises_is_a_row_and_the_next_one_is_tried():
    def measure(case):
        if case["case"] == "first":
            raise ValueError("no\nmore words")
        if case["case"] == "second":
            raise NotRun("no such device")
        return {"ms": 1.0}

    assert rows_of(NAMES, measure) == [
        {"case": "first", "error": "ValueError: no"},
        {"case": "second", "not_run": "no such device"},
        {"case": "third", "ms": 1.0},
    ]


def rows_in_time(deadline, **seconds_of_cases):
    """Names of the cases that are begun when each takes so long; the effort is the name's first letter."""
    now = [0.0]

    def measure(case):
        now[0] += seconds_of_cases[case["case"]]
        return {"ms": 1.0}

    out = io.StringIO()
    cases = tuple({"case": name, "effort": name[0]} for name in seconds_of_cases)
    run_cases(cases, measure, out, deadline=deadline, clock=lambda: now[0])
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row["case"] for row in rows] == list(seconds_of_cases)
    return [row["case"] for row in rows if "ms" in row], [row["not_run"] for row in rows if "not_run" in row]


def test_a_case_is_not_begun_when_the_last_of_its_effort_would_not_fit():
    begun, why = rows_in_time(26, a1=10, a2=5, a3=10, a4=1)
    assert begun == ["a1", "a2", "a3"] and why == ["1 s were left, and it may take 10 s"]


def test_what_the_first_case_alone_had_to_load_is_not_expected_of_the_others():
    # The second is expected to take 40 seconds as the first did, the third 20, half of the longest.
    assert rows_in_time(75, a1=40, a2=10)[0] == ["a1"]
    assert rows_in_time(85, a1=40, a2=10, a3=10, a4=10)[0] == ["a1", "a2", "a3", "a4"]
    assert rows_in_time(79, a1=38, a2=10, a3=10, a4=10, a5=10)[0] == ["a1", "a2", "a3", "a4"]


def test_a_case_of_less_effort_may_be_begun_where_a_longer_one_may_not():
    assert rows_in_time(100, a1=60, b1=2, a2=60, b2=2)[0] == ["a1", "b1", "b2"]


def test_a_first_case_of_its_effort_needs_some_time_but_the_very_first_is_always_begun():
    assert rows_in_time(20, a1=10, b1=1)[0] == ["a1"]
    assert rows_in_time(30, a1=10, b1=1)[0] == ["a1", "b1"]
    assert rows_in_time(1, a1=10, b1=1)[0] == ["a1"]


@pytest.mark.parametrize("smoke", [True, False])
def test_the_plan_fits_its_time_and_names_every_case_once(smoke):
    chosen = parts(smoke=smoke)
    assert sum(part.least_s for part in chosen) <= 9 * 60 - 60
    assert all(part.cases and part.least_s <= part.most_s for part in chosen)
    for part in chosen:
        names = [case["case"] for case in part.cases]
        assert len(set(names)) == len(names)
    assert json.loads(json.dumps([part.cases for part in chosen]))


def test_a_smoke_run_has_the_parts_and_kinds_of_a_real_one():
    real, smoke = ({part.name: part for part in parts(smoke=value)} for value in (False, True))
    assert list(real) == list(smoke)
    for name in ("branches", "attention"):
        kinds = [{(case["kind"], case["implementation"]) for case in plan[name].cases} for plan in (real, smoke)]
        assert kinds[0] == kinds[1]


def test_what_the_issue_asks_for_is_in_the_plan():
    cases = {part.name: [case["case"] for case in part.cases] for part in parts(smoke=False)}
    for batch in (1, 8, 32, 128):
        for model, name in (("Qwen3-8B", "decode-8b"), ("Qwen3-0.6B", "decode-0.6b")):
            assert f"{model}, batch {batch}, context 1,024, a loop of 16 steps" in cases[name]
            assert f"{model}, batch {batch}, context 1,024, one launch a step" in cases[name]
    for trunk in ("2,048", "8,192", "32,768"):
        assert f"1 branch over {trunk}, one lane: kernel" in cases["branches"]
        for count in (4, 8, 16):
            assert f"{count} branches over {trunk}, one lane: kernel" in cases["branches"]
            assert f"{count} branches over {trunk}, lanes of their own: kernel" in cases["branches"]
    assert cases["branches"][:2] == [
        "8 branches over 8,192, one lane: kernel", "8 branches over 8,192, lanes of their own: kernel"
    ]  # fmt: skip
    assert any("60 nodes" in case for case in cases["attention"])
