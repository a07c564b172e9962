"""Texts that grow side by side, in as many columns as a terminal has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

PANE_WIDTH = 48
REFRESHES_PER_SECOND = 10


@dataclass
class Pane:
    """A text and what it answers."""

    title: str
    heading: str = ""
    text: str = ""
    finished: bool = False


def side_by_side(console: Console, panes: Sequence[Pane], *, height: int | None = None) -> Table:
    """The panes in rows and columns.

    Args:
        height: lines that all rows together may have: headings are shortened then, and of each text the end is shown;
            None: everything is shown in full.
    """
    columns = max(1, min(len(panes), console.width // PANE_WIDTH))
    rows = [panes[start : start + columns] for start in range(0, len(panes), columns)]
    of_row = None if height is None else max(5, height // max(1, len(rows)))
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    for row in rows:
        grid.add_row(*(panel(console, pane, console.width // columns - 4, of_row) for pane in row))
    return grid


def panel(console: Console, pane: Pane, width: int, height: int | None) -> Panel:
    """One pane: its heading, shortened where it has to fit, and its text."""
    heading = Text(pane.heading, style="dim")
    text = Text(pane.text)
    if height is not None:
        heading = Text(pane.heading.replace("\n", " "), style="dim", no_wrap=True, overflow="ellipsis")
        room = height - 2 - bool(pane.heading)
        text = Text("\n").join(text.wrap(console, width)[-room:])
    style = "green" if pane.finished else "yellow"
    content = Group(heading, text) if pane.heading else text
    return Panel(content, title=Text(pane.title), border_style=style, height=height)
