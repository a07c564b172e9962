"""What a soak counts as a problem, each by itself."""

import dataclasses

import pytest

from soaking.load import MOST_LATE_THREADS, Findings, Sample, judge_memory, note_problems
from soaking.report import tables
from soaking.server import Log, held
from soaking.tally import Tally

CLEAN = Findings(
    seconds=100.0, is_cache_empty=True, rss_after_warm_up=1000, rss_at_end=1049, exit_code=0,
    files_when_ready=12, files_at_end=12, threads_when_ready=8, threads_at_end=8 + MOST_LATE_THREADS,
)  # fmt: skip
IDLE = {
    "fault": None, "num_pages": 9, "num_free_pages": 4, "num_cached_pages": 5, "num_held_pages": 0, "num_seats": 2,
    "num_free_seats": 2, "num_requests": 0, "num_readers": 0, "num_http_requests": 0, "num_tasks": 7,
}  # fmt: skip


def problems(tally=None, **changes):
    findings = dataclasses.replace(CLEAN, **{"problems": [], **changes})
    note_problems(findings, tally or Tally())
    return findings.problems


def test_a_clean_soak_has_no_problem():
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"held": {"num_requests": 1}}, "the engine still holds {'num_requests': 1}"),
        ({"is_cache_empty": False}, "pages are not free"),
        ({"compiles": 2}, "2 compiles after warm-up"),
        ({"rss_at_end": 1051}, "memory has grown by 5.1%"),
        ({"rss_at_end": 0}, "memory was not measured"),
        ({"files_at_end": 13}, "13 files are open after the load, 12 were before it"),
        ({"threads_at_end": 9 + MOST_LATE_THREADS}, "threads run after the load, 8 did before it"),
        ({"exit_code": 3}, "the exit code is 3"),
        ({"exit_code": None}, "the exit code is None"),
        ({"faults": [["an error"]]}, "the log has 1 errors"),
    ],
)
def test_each_finding_is_a_problem(changes, says):
    (found,) = problems(**changes)
    assert says in found


def test_an_outcome_that_is_not_allowed_is_a_problem():
    tally = Tally()
    tally.note("whole", "equal")
    tally.fail("whole", "other tokens", request=3)
    assert problems(tally) == ["1 outcomes were not allowed"]
    tally.statuses[500] += 1
    assert problems(tally) == ["1 outcomes were not allowed", "responses with status 500: 1"]
    assert tally.as_json()["outcomes"] == {"whole": {"FAILED": 1, "equal": 1}}
    assert tally.failures == [{"manner": "whole", "reason": "other tokens", "request": 3}]


def test_memory_after_the_warm_up_is_compared_with_the_last():
    sizes = {0: 500, 55: 700, 62: 1000, 65: 1001, 80: 1500, 97: 1100, 99: 1102}
    findings = Findings(100.0, [Sample(float(second), size, 1, 1, 0, 0) for second, size in sizes.items()])
    judge_memory(findings, 60.0)
    assert (findings.rss_after_warm_up, findings.rss_at_end) == (1000, 1101)
    assert findings.growth == pytest.approx(0.101)


def test_what_an_engine_holds_is_found():
    assert held(IDLE) == {}
    changes = {"fault": "a page is held twice", "num_held_pages": 1, "num_readers": 2, "num_free_seats": 1}
    assert held(IDLE | changes) == {
        "fault": "a page is held twice", "num_held_pages": 1, "num_readers": 2, "taken seats": 1,
    }  # fmt: skip


def test_errors_of_a_log_are_kept_with_what_follows_them():
    log = Log()
    for line in (
        "2026-01-01 00:00:00,000 INFO jaxinfer.server: ready: tiny",
        "2026-01-01 00:00:01,000 ERROR uvicorn.error: Exception in ASGI application",
        "Traceback (most recent call last):",
        "RuntimeError: no",
        "2026-01-01 00:00:02,000 WARNING uvicorn.error: Invalid HTTP request received.",
        "2026-01-01 00:00:03,000 WARNING jaxinfer.engine: compiled after warm-up, which delays running requests: x",
    ):
        log.add(line)
    first, second = log.faults
    assert first[0].endswith("Exception in ASGI application")
    assert first[1:] == ["Traceback (most recent call last):", "RuntimeError: no"]
    assert len(second) == 1 and len(log.latest) == 6


def test_tables_show_what_was_found():
    tally = Tally()
    tally.fail("whole", "a [bold] difference")
    findings = dataclasses.replace(CLEAN, samples=[Sample(1.0, 2 << 20, 3, 4, 5, 6)], problems=["one"])
    tally.compared["/v1/messages", "streamed"] += 3
    found = tables(findings, tally)
    assert [table.title for table in found] == [
        "Outcomes", "Answers that were compared", "The server's process", "At the end", "First failures",
    ]  # fmt: skip
    assert [list(column.cells) for column in found[1].columns] == [["/v1/messages"], ["3"], ["0"]]
