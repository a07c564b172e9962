"""An answer as it grows: the text of each pane, and plain text where there is no terminal."""

import io
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from branching.growing_answer import GrowingAnswer, answer_live, summary, summary_line
from jaxinfer import SamplingParams
from jaxinfer.skeleton.answer import PointOutput, SkeletonEvent, SkeletonMetrics, SkeletonOutput
from jaxinfer.skeleton.plan import parse_skeleton
from jaxinfer.skeleton.prompts import PlanPrompts

WRITTEN = "[PLAN]\n1.<20><None>[-]Mend\n2.<20><None>[-]Clean\n[END]"
EVENTS = [
    SkeletonEvent(None, "[PLAN]\n1.<20>", 1, 1, False),
    SkeletonEvent(None, "<None>[-]Mend\n2.<20><None>[-]Clean\n[END]", 1, 2, True),
    SkeletonEvent(2, "[ANSWER]Wipe ", 1, 3, False),
    SkeletonEvent(1, "[ANSWER]Glue [it]", 1, 3, False),
    SkeletonEvent(1, "[END]", 1, 4, True),
    SkeletonEvent(2, "it.", 2, 6, True),
]
OUTPUT = SkeletonOutput(
    "How?", WRITTEN, parse_skeleton(WRITTEN, 20),
    [PointOutput(1, "Mend", "Glue [it]", [1, 2], "stop"), PointOutput(2, "Clean", "Wipe it.", [1, 2, 3], "stop")],
    "1. Mend: Glue [it]\n2. Clean: Wipe it.", SkeletonMetrics(2, 2, 0.5, 4, 5, 0.25),
)  # fmt: skip


class Told:
    """Answers always the same."""

    prompts = PlanPrompts()

    def answer(self, question, params, *, on_event, **options):
        for event in EVENTS:
            on_event(event)
        return OUTPUT


def show(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, height=20, force_terminal=terminal)
    output, events = answer_live(console, cast(Any, Told()), "How?", SamplingParams(max_tokens=20))
    assert (output, events) == (OUTPUT, EVENTS)
    return out.getvalue()


def test_points_have_panes_from_the_end_of_the_skeleton_on():
    growing = GrowingAnswer(cast(Any, SimpleNamespace(prompts=PlanPrompts())), "How?", 20)
    for event in EVENTS[:1]:
        growing.take(event)
    assert not growing.points and not growing.skeleton.finished
    for event in EVENTS[1:4]:
        growing.take(event)
    assert {pane.title: pane.text for pane in growing.points.values()} == {"1. Mend": "Glue [it]", "2. Clean": "Wipe"}
    assert not any(pane.finished for pane in growing.points.values())


def test_without_a_terminal_the_whole_is_printed_without_control_codes():
    text = show(terminal=False)
    assert "\x1b" not in text
    assert text.index("=== skeleton\nHow?\n[PLAN]") < text.index("=== 1. Mend\nGlue [it]") < text.index("Wipe it.")


def test_a_terminal_shows_the_points_side_by_side_at_the_end():
    last = show(terminal=True).rsplit("\x1b[2K", 1)[-1]
    assert any("1. Mend" in line and "2. Clean" in line for line in last.splitlines())
    assert "Glue [it]" in last and "Wipe it." in last


def test_tokens_per_step_are_those_of_the_points():
    assert summary_line(OUTPUT) == "5 tokens of 2 points in 4 steps: 1.2 tokens per step"
    out = io.StringIO()
    Console(file=out, width=100).print(summary(OUTPUT))
    [line] = [line for line in out.getvalue().splitlines() if "2 points" in line]
    assert line.split("│")[2:-1] == ["     4 ", "      5 ", "            1.25 ", "    0.25 "]
