"""An answer by Skeleton-of-Thought as it grows: the skeleton first, then all of its points side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from jaxinfer import SamplingParams
from jaxinfer.skeleton.answer import SkeletonEvent, SkeletonOfThought, SkeletonOutput
from jaxinfer.skeleton.plan import point_text
from terminal.panes import REFRESHES_PER_SECOND, Pane, side_by_side


class GrowingAnswer:
    """What has come of an answer so far.

    Args:
        method: whose skeletons it reads, for the titles of points.
        question: what is answered.
        budget: the most tokens of a point.
    """

    def __init__(self, method: SkeletonOfThought, question: str, budget: int) -> None:
        self.skeleton = Pane("skeleton", question)
        self.points: dict[int, Pane] = {}
        self.events: list[SkeletonEvent] = []
        self._written: dict[int | None, str] = {}
        self._method, self._budget = method, budget

    def take(self, event: SkeletonEvent) -> None:
        """Text that is new."""
        self.events.append(event)
        written = self._written[event.point] = self._written.get(event.point, "") + event.text
        if event.point is not None:
            pane = self.points[event.point]
            pane.text, pane.finished = point_text(written), event.finished
            return
        self.skeleton.text, self.skeleton.finished = written, event.finished
        if event.finished:
            found = self._method.prompts.parse(written, self._budget)
            self.points = {point.id: Pane(f"{point.id}. {point.title}") for point in found.points}

    def screen(self, console: Console, *, in_full: bool = False) -> Group:
        """The skeleton over the points; while they grow, within the terminal's height."""
        above = side_by_side(console, [self.skeleton])
        if not self.points:
            return Group(above)
        room = console.height - 1 - len(console.render_lines(above))
        return Group(above, side_by_side(console, list(self.points.values()), height=None if in_full else room))


def answer_live(
    console: Console, method: SkeletonOfThought, question: str, params: SamplingParams, **options: Any
) -> tuple[SkeletonOutput, list[SkeletonEvent]]:
    """Answer a question and show it: on a terminal while it grows, elsewhere when it is whole, in plain text.

    Args:
        options: of `SkeletonOfThought.answer`.

    Returns:
        The answer, and all that was told of it on the way.
    """
    growing = GrowingAnswer(method, question, params.max_tokens or 1)
    if not console.is_terminal:
        output = method.answer(question, params, on_event=growing.take, **options)
        for pane in (growing.skeleton, *growing.points.values()):
            console.out(f"=== {pane.title}", *filter(None, (pane.heading, pane.text)), "", sep="\n", highlight=False)
        return output, growing.events
    with Live(console=console, transient=True, refresh_per_second=REFRESHES_PER_SECOND) as live:

        def on_event(event: SkeletonEvent) -> None:
            growing.take(event)
            live.update(growing.screen(console))

        output = method.answer(question, params, on_event=on_event, **options)
    console.print(growing.screen(console, in_full=True))
    return output, growing.events


def summary(output: SkeletonOutput) -> Table:
    """Steps, tokens and seconds of the skeleton and of its points."""
    metrics = output.metrics
    skeleton = (metrics.skeleton_steps, metrics.skeleton_tokens, metrics.skeleton_seconds)
    points = (metrics.point_steps, metrics.point_tokens, metrics.point_seconds)
    both = [sum(values) for values in zip(skeleton, points, strict=True)]
    table = Table()
    for heading in ("", "steps", "tokens", "tokens per step", "seconds"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = {"skeleton": skeleton, f"{len(output.points)} points": points, "both": both}
    for name, (steps, tokens, seconds) in rows.items():
        table.add_row(name, f"{steps}", f"{tokens}", f"{tokens / max(1, steps):.2f}", f"{seconds:.2f}")
    return table


def summary_line(output: SkeletonOutput) -> str:
    """How many tokens the points have, and in how many steps they came."""
    metrics = output.metrics
    return (
        f"{metrics.point_tokens} tokens of {len(output.points)} points in {metrics.point_steps} steps: "
        f"{metrics.point_tokens / max(1, metrics.point_steps):.1f} tokens per step"
    )
