"""What a soak has found, as tables for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from soaking.load import Findings
from soaking.tally import Tally

_SHOWN_SAMPLES, _SHOWN_FAILURES = 12, 10


def tables(findings: Findings, tally: Tally) -> list[Table]:
    """Tables of outcomes, of compared answers, of the process over time, of the end, and of the first failures."""
    found = [_outcomes(tally), _compared(tally), _series(findings), _end(findings, tally)]
    return [*found, _failures(tally)] if tally.failures else found


def _outcomes(tally: Tally) -> Table:
    table = Table("clients", "outcomes", title="Outcomes", title_justify="left")
    by_manner: dict[str, list[str]] = {}
    for (manner, outcome), count in sorted(tally.outcomes.items()):
        by_manner.setdefault(manner, []).append(f"{outcome}: {count}")
    for manner, words in by_manner.items():
        table.add_row(manner, escape(", ".join(words)))
    return table


def _compared(tally: Tally) -> Table:
    table = Table("endpoint", "streamed", "whole", title="Answers that were compared", title_justify="left")
    for path in sorted({path for path, _ in tally.compared}):
        table.add_row(path, *(str(tally.compared[path, form]) for form in ("streamed", "whole")))
    return table


def _series(findings: Findings) -> Table:
    table = Table(
        "seconds", "MiB resident", "threads", "open files", "running", "waiting", title="The server's process"
    )
    table.title_justify = "left"
    samples = findings.samples
    for sample in samples[:: max(1, len(samples) // _SHOWN_SAMPLES)]:
        table.add_row(
            f"{sample.seconds:.0f}", f"{sample.rss_bytes / 2**20:.1f}", str(sample.num_threads), str(sample.num_files),
            str(sample.num_running), str(sample.num_waiting),
        )  # fmt: skip
    return table


def _end(findings: Findings, tally: Tally) -> Table:
    table = Table("quantity", "value", title="At the end", title_justify="left")
    before, after = (value / 2**20 for value in (findings.rss_after_warm_up, findings.rss_at_end))
    names = ("num_preemptions_total", "num_step_failures_total", "num_recoveries_total", "generation_tokens_total")
    rows = {
        "requests": f"{tally.num_requests} in {findings.seconds:.0f} s",
        "statuses": ", ".join(f"{status}: {count}" for status, count in sorted(tally.statuses.items())),
        "near ties": f"{tally.ties.total()} answers of {len(tally.ties)} requests",
        "requests with calls that are not judged": str(findings.num_unjudged),
        "held of requests": str(findings.held or "nothing"),
        "pages free after a reset of the cache": "all" if findings.is_cache_empty else "NOT ALL",
        "compiles after warm-up": str(findings.compiles),
        "open files before the load and after it": f"{findings.files_when_ready}, {findings.files_at_end}",
        "threads before the load and after it": f"{findings.threads_when_ready}, {findings.threads_at_end}",
        "memory after the warm-up of the load": f"{before:.1f} MiB",
        "memory at the end": f"{after:.1f} MiB, {findings.growth:+.1%}",
        **{name: f"{findings.metrics.get(f'jaxinfer:{name}', 0):.0f}" for name in names},
        "exit code after SIGTERM": str(findings.exit_code),
        "problems": "; ".join(findings.problems) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _failures(tally: Tally) -> Table:
    table = Table("clients", "what was not allowed", title="First failures", title_justify="left")
    for failure in tally.failures[:_SHOWN_FAILURES]:
        more = {name: value for name, value in failure.items() if name not in ("manner", "reason")}
        table.add_row(failure["manner"], escape(f"{failure['reason'][:600]} {more or ''}"))
    return table
