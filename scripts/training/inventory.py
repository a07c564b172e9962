"""The written inventory of the tiny corpus: objects, tasks with their points, facts of the small world, small talk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"
TASK_FILES = ("tasks_making.txt", "tasks_living.txt", "tasks_people.txt")
HELD_OUT_PERCENT = 10


@dataclass(frozen=True)
class Thing:
    """An object that tasks are about. What the three attributes mean depends on the class:

    thing: two parts, material; plant: plants, tool, spot; food: two ingredients, vessel; event: two things needed,
    place; text: two contents, readers; place: two sights, way to get there; skill: two elements, gear;
    animal: food, gear, sleeping place.
    """

    kind: str
    name: str
    first: str
    second: str
    third: str


@dataclass(frozen=True)
class Point:
    """One point of a task: a title, the words that show that a text is about it, and its sentences (templates)."""

    title: str
    keywords: tuple[str, ...]
    openers: tuple[str, ...]
    followers: tuple[str, ...]


@dataclass(frozen=True)
class Action:
    """What can be done with every object of one class, as eight points in their natural order."""

    name: str
    kind: str
    phrase: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Exchange:
    """Several ways to say one thing to the assistant and several answers."""

    asks: tuple[str, ...]
    answers: tuple[str, ...]


def is_held_out(key: str) -> bool:
    """Whether a combination belongs to the held-out tenth. Depends on nothing but the key, so no list is needed."""
    digest = hashlib.blake2s(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def lines_of(file: str) -> list[tuple[int, str]]:
    """The lines of an inventory file with their numbers, without comments and empty ones."""
    text = (DATA / file).read_text(encoding="utf-8")
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


def fields_of(file: str, number: int, line: str, count: int) -> list[str]:
    """The fields of a line. Raises ValueError (file and line) unless there are `count`."""
    fields = [field.strip() for field in line.split("|")]
    if len(fields) != count or not all(fields):
        raise ValueError(f"{file}:{number}: expected {count} fields separated by '|', got {line!r}")
    return fields


@cache
def things() -> dict[str, tuple[Thing, ...]]:
    """The objects of every class, in file order."""
    found: dict[str, list[Thing]] = {}
    kind = ""
    for number, line in lines_of("objects.txt"):
        if line.startswith("["):
            kind = line.strip("[]")
            found[kind] = []
        else:
            found[kind].append(Thing(kind, *fields_of("objects.txt", number, line, 4)))
    return {kind: tuple(members) for kind, members in found.items()}


@cache
def actions() -> tuple[Action, ...]:
    """All actions of the task files. Raises ValueError (file and line) where a point is not complete."""
    return tuple(action for file in TASK_FILES for action in _read_actions(file))


def _read_actions(file: str) -> list[Action]:
    headers: list[list[str]] = []
    points: list[list[Point]] = []
    parts: dict[str, list[str]] = {}
    head: list[str] = []

    def close(number: int) -> None:
        if not head:
            return
        if len(parts["+"]) != 2 or len(parts["-"]) != 2:
            raise ValueError(f"{file}:{number}: point {head[0]!r} needs two '+' and two '-' sentences")
        points[-1].append(Point(head[0], tuple(head[1].split()), tuple(parts["+"]), tuple(parts["-"])))

    for number, line in lines_of(file):
        mark, rest = line[0], line[1:].strip()
        if mark == "@":
            close(number)
            head = []
            headers.append(fields_of(file, number, rest, 3))
            points.append([])
        elif mark == "=":
            close(number)
            head = fields_of(file, number, rest, 2)
            parts = {"+": [], "-": []}
        elif mark in parts:
            parts[mark].append(rest)
        else:
            raise ValueError(f"{file}:{number}: line starts with {mark!r}, allowed are '@', '=', '+', '-'")
    close(-1)
    return [
        Action(name, kind, phrase, tuple(members))
        for (name, kind, phrase), members in zip(headers, points, strict=True)
    ]


@cache
def exchanges(file: str) -> tuple[Exchange, ...]:
    """The exchanges of "world.txt" or "smalltalk.txt"."""
    found: list[Exchange] = []
    asks: tuple[str, ...] = ()
    for number, line in lines_of(file):
        options = tuple(option.strip() for option in line[1:].split(" / "))
        if line[0] == "?":
            asks = options
        elif line[0] == "!" and asks:
            found.append(Exchange(asks, options))
            asks = ()
        else:
            raise ValueError(f"{file}:{number}: expected '?' and then '!', got {line!r}")
    return tuple(found)


@cache
def combinations(held_out: bool) -> tuple[tuple[Action, Thing], ...]:
    """All (action, object) pairs of one side of the split."""
    return tuple(
        (action, thing)
        for action in actions()
        for thing in things()[action.kind]
        if is_held_out(f"task:{action.name}:{thing.name}") is held_out
    )
