"""Plans of the tiny corpus: skeletons, point expansions, guides, and the mechanical checks of all three."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from training.inventory import Action, Point, Thing, actions, combinations
from training.language import NUMBER_WORDS, fix_articles, person, with_article

PLAN_SYSTEM = "Answer with [PLAN] and a list of points, or with [DIRECT] and one short answer."
MIN_POINTS, MAX_POINTS = 3, 8
TOKENS_PER_WORD = 1.3

ASK_PLAN = (
    "Make a plan: {task}.",
    "How do I {task}?",
    "I want to {task}. What are the steps?",
    "What is the best way to {task}?",
)
ASK_PLAN_COUNTED = (
    "Make a plan with {n} points: {task}.",
    "I want to {task}. Give me {n} steps.",
    "How do I {task}? Use {n} points.",
)
ASK_GUIDE = (
    "Write a guide with {n} points: {task}.",
    "Explain in {n} points how to {task}.",
)

_SENTENCE = re.compile(r"[A-Z][^.!?]*[.!?]")
_LINE = re.compile(r"(\d+)\.<(\d+)><None>\[-\](\S.*)")


@dataclass(frozen=True)
class Task:
    """One combination: what is done, with which object, and the reader that it addresses ("" = none)."""

    action: Action
    thing: Thing
    reader: str = ""

    @property
    def key(self) -> str:
        return f"{self.action.name}:{self.thing.name}:{self.reader}"

    @property
    def phrase(self) -> str:
        """The task in words, such as "repair a bicycle"."""
        return self.fill(self.action.phrase)

    def fill(self, template: str) -> str:
        thing = self.thing
        bare = thing.name if thing.kind == "skill" else with_article(thing.name)
        reader = f", {self.reader}" if self.reader else ""
        slots = {"o": thing.name, "a": bare, "p": thing.first, "q": thing.second, "m": thing.third, "for": reader}
        text = template.format_map(slots)
        return fix_articles(text)

    def title(self, point: Point) -> str:
        return self.fill(point.title)

    def sentences(self, point: Point, rng: random.Random, count: int) -> str:
        """Two or three sentences: an opener, which names the object and a keyword, then one or both followers."""
        followers = point.followers if count == 3 else (rng.choice(point.followers),)
        return " ".join(self.fill(template) for template in (rng.choice(point.openers), *followers))

    def expected_tokens(self, point: Point, count: int) -> int:
        """The usual length of `count` sentences in tokens, in steps of five; two sentences never exceed 30, three never
        fall below 35, so that the number says how many are wanted."""
        templates = (*point.openers, *point.followers)
        words = sum(len(self.fill(template).split()) for template in templates) / len(templates)
        rounded = 5 * round(words * count * TOKENS_PER_WORD / 5)
        return min(max(rounded, 15), 30) if count == 2 else max(rounded, 35)


@dataclass(frozen=True)
class Skeleton:
    """The chosen points of a task with the number of sentences that each is to have."""

    task: Task
    points: tuple[Point, ...]
    counts: tuple[int, ...]

    def plan(self) -> str:
        """The answer in the plan format."""
        lines = [
            f"{number}.<{self.task.expected_tokens(point, count)}><None>[-]{self.task.title(point)}"
            for number, (point, count) in enumerate(zip(self.points, self.counts, strict=True), start=1)
        ]
        return "\n".join(["[PLAN]", *lines, "[END]"])

    def outline(self) -> str:
        """The cleaned skeleton that expansion prompts show: "1. Title one", one line each."""
        return "\n".join(f"{number}. {self.task.title(point)}" for number, point in enumerate(self.points, start=1))

    def ask_point(self, index: int) -> str:
        """The request for one point, counted from 0."""
        point = self.points[index]
        tokens = self.task.expected_tokens(point, self.counts[index])
        return f"Write point {index + 1}: {self.task.title(point)} (about {tokens} tokens)."

    def expansion_prompt(self, index: int) -> str:
        """The user turn of an expansion; all but its last line is common to the points of one skeleton."""
        reader = f"Reader: {self.task.reader}\n" if self.task.reader else ""
        return f"Task: {self.task.phrase}\n{reader}Plan:\n{self.outline()}\n{self.ask_point(index)}"

    def expansion(self, index: int, rng: random.Random) -> str:
        return f"[ANSWER]{self.task.sentences(self.points[index], rng, self.counts[index])}[END]"

    def guide(self, rng: random.Random) -> str:
        """All points in one answer, one line each."""
        return "\n".join(
            f"{number}. {self.task.title(point)}: {self.task.sentences(point, rng, count)}"
            for number, (point, count) in enumerate(zip(self.points, self.counts, strict=True), start=1)
        )


def draw_task(rng: random.Random, held_out: bool) -> Task:
    """A random combination from one side of the split; half of them name a person."""
    pool = combinations(held_out)
    by_action: dict[str, list[tuple[Action, Thing]]] = {}
    for pair in pool:
        by_action.setdefault(pair[0].name, []).append(pair)
    action, thing = rng.choice(by_action[rng.choice(sorted(by_action))])
    return Task(action, thing, person(rng, held_out) if rng.random() < 0.5 else "")


def draw_skeleton(rng: random.Random, task: Task, size: int | None = None) -> Skeleton:
    """A random choice of points, in their natural order."""
    size = size or rng.randint(MIN_POINTS, MAX_POINTS)
    chosen = sorted(rng.sample(range(len(task.action.points)), size))
    points = tuple(task.action.points[index] for index in chosen)
    return Skeleton(task, points, tuple(rng.choice((2, 3)) for _ in points))


def ask_for(rng: random.Random, task: Task, templates: tuple[str, ...], size: int) -> str:
    """A request in one of the given wordings, in the name of the reader."""
    number = rng.choice((str(size), NUMBER_WORDS[size]))
    introduction = f"I am {task.reader}. " if task.reader else ""
    return introduction + rng.choice(templates).format(task=task.phrase, n=number)


def names_a_number(request: str) -> bool:
    """Whether a request says how many points its plan or guide is to have."""
    return any(word in request for word in (" points", " steps: ", " steps."))


def parse_skeleton(text: str) -> list[str] | None:
    """The titles of a well-formed plan, else None. Strict: tags on lines of their own, ids 1 to n, 3 to 8 lines, a
    positive length, the tool None, no dependencies, a title without spaces around it, nothing before or after."""
    lines = text.split("\n")
    if len(lines) < 2 or lines[0] != "[PLAN]" or lines[-1] != "[END]":
        return None
    titles = []
    for number, line in enumerate(lines[1:-1], start=1):
        match = _LINE.fullmatch(line)
        if match is None or match[1] != str(number) or int(match[2]) == 0 or match[3] != match[3].rstrip():
            return None
        titles.append(match[3])
    return titles if MIN_POINTS <= len(titles) <= MAX_POINTS else None


def skeleton_belongs(text: str, task: Task) -> bool:
    """Whether a plan is well-formed and consists of different titles of this task."""
    titles = parse_skeleton(text)
    own = {task.title(point) for point in task.action.points}
    return titles is not None and len(set(titles)) == len(titles) and set(titles) <= own


def split_sentences(text: str) -> list[str] | None:
    """The complete sentences that make up the text, else None."""
    found = _SENTENCE.findall(text)
    return found if found and " ".join(found) == text else None


def mentions(text: str, words: str) -> bool:
    """Whether the words occur in this order, whole and side by side, in any case."""
    return re.search(rf"\b{re.escape(words)}\b", text, re.IGNORECASE) is not None


def on_topic(text: str, task: Task, point: Point) -> bool:
    """Whether an expansion is in the right tags, has two or three complete sentences, names the object of the task and
    at least one keyword of the point."""
    if not (text.startswith("[ANSWER]") and text.endswith("[END]")):
        return False
    body = text.removeprefix("[ANSWER]").removesuffix("[END]")
    sentences = split_sentences(body)
    if sentences is None or not 2 <= len(sentences) <= 3:
        return False
    return mentions(body, task.thing.name) and any(mentions(body, keyword) for keyword in point.keywords)


def find_point(task: Task, title: str) -> Point | None:
    """The point of a task that has this title, else None."""
    return next((point for point in task.action.points if task.title(point) == title), None)


def action_named(name: str) -> Action:
    return next(action for action in actions() if action.name == name)
