"""The corpus of the embedded checkpoint: a seeded stream of samples, training or held out."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from training.chat import conversation, direct, object_question, small_talk, turns, world_question
from training.plans import (
    ASK_GUIDE,
    ASK_PLAN,
    ASK_PLAN_COUNTED,
    PLAN_SYSTEM,
    Skeleton,
    Task,
    ask_for,
    draw_skeleton,
    draw_task,
)
from training.reading import Exercise, reading, reading_series, repetition
from training.records import arithmetic, from_record, to_record
from training.renamed import renamed
from training.tool_format import turns_of
from training.tools import ToolTalk, bare_call, call, chain, error, no_call, result, series, two_calls

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One document: a conversation, or plain text where `messages` is empty. Plan kinds carry what the checks need, and
    conversations with tools, of which `messages` are the turns as the model sees them, how a request has them."""

    kind: str
    messages: tuple[dict[str, str], ...]
    text: str = ""
    task: Task | None = None
    skeleton: Skeleton | None = None
    point: int = -1
    talk: ToolTalk | None = None

    @property
    def prompt(self) -> Messages:
        """The conversation up to the last answer."""
        return list(self.messages[:-1])

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]


def _turn(user: str, assistant: str, system: str = "") -> tuple[dict[str, str], ...]:
    head = ({"role": "system", "content": system},) if system else ()
    return (*head, {"role": "user", "content": user}, {"role": "assistant", "content": assistant})


def _ask_plan(rng: random.Random, task: Task, size: int) -> str:
    return ask_for(rng, task, rng.choice((ASK_PLAN, ASK_PLAN_COUNTED)), size)


def plan(rng: random.Random, held_out: bool) -> Sample:
    task = draw_task(rng, held_out)
    skeleton = draw_skeleton(rng, task)
    ask = _ask_plan(rng, task, len(skeleton.points))
    return Sample("plan", _turn(ask, skeleton.plan(), PLAN_SYSTEM), "", task, skeleton)


def expansion(rng: random.Random, held_out: bool) -> Sample:
    task = draw_task(rng, held_out)
    skeleton = draw_skeleton(rng, task)
    index = rng.randrange(len(skeleton.points))
    messages = _turn(skeleton.expansion_prompt(index), skeleton.expansion(index, rng))
    return Sample("expansion", messages, "", task, skeleton, index)


def expansion_after_plan(rng: random.Random, held_out: bool) -> Sample:
    """The point is asked for in the conversation that made the plan."""
    task = draw_task(rng, held_out)
    skeleton = draw_skeleton(rng, task)
    index = rng.randrange(len(skeleton.points))
    first = _turn(_ask_plan(rng, task, len(skeleton.points)), skeleton.plan(), PLAN_SYSTEM)
    messages = first + _turn(skeleton.ask_point(index), skeleton.expansion(index, rng))
    return Sample("expansion_after_plan", messages, "", task, skeleton, index)


def guide(rng: random.Random, held_out: bool) -> Sample:
    task = draw_task(rng, held_out)
    skeleton = draw_skeleton(rng, task, rng.choice((3, 3, 4, 5)))
    ask = ask_for(rng, task, ASK_GUIDE, len(skeleton.points))
    return Sample("guide", _turn(ask, skeleton.guide(rng)), "", task, skeleton)


def article(rng: random.Random, held_out: bool) -> Sample:
    """Plain text without roles, so that raw prompts such as "How to repair a bicycle" work too."""
    task = draw_task(rng, held_out)
    skeleton = draw_skeleton(rng, task, rng.choice((3, 4)))
    for_reader = f", for {task.reader}" if task.reader else ""
    return Sample("article", (), f"How to {task.phrase}{for_reader}\n{skeleton.guide(rng)}", task, skeleton)


def dialogue(rng: random.Random, held_out: bool) -> Sample:
    return Sample("dialogue", tuple(conversation(rng, held_out, rng.randint(2, 4))))


def long_dialogue(rng: random.Random, held_out: bool) -> Sample:
    return Sample("long_dialogue", tuple(conversation(rng, held_out, rng.randint(6, 14))))


def direct_answer(rng: random.Random, held_out: bool) -> Sample:
    return Sample("direct", tuple(direct(rng, held_out)))


def many_questions(rng: random.Random, held_out: bool) -> Sample:
    return Sample("reading_series", tuple(turns(reading_series(rng, held_out))))


def _single(kind: str, make: Callable[[random.Random, bool], Exercise]) -> Callable[[random.Random, bool], Sample]:
    return lambda rng, held_out: Sample(kind, tuple(turns([make(rng, held_out)])))


def _with_tools(kind: str, make: Callable[[random.Random, bool], ToolTalk]) -> Callable[[random.Random, bool], Sample]:
    def sample(rng: random.Random, held_out: bool) -> Sample:
        talk = make(rng, held_out)
        return Sample(kind, tuple(turns_of(talk.tools, talk.messages)), talk=talk)

    return sample


KINDS: dict[str, Callable[[random.Random, bool], Sample]] = {
    "plan": plan,
    "expansion": expansion,
    "expansion_after_plan": expansion_after_plan,
    "guide": guide,
    "article": article,
    "direct": direct_answer,
    "dialogue": dialogue,
    "long_dialogue": long_dialogue,
    "world": _single("world", world_question),
    "small_talk": _single("small_talk", small_talk),
    "object": _single("object", object_question),
    "reading": _single("reading", reading),
    "reading_series": many_questions,
    "repetition": _single("repetition", repetition),
    "to_json": _single("to_json", to_record),
    "from_json": _single("from_json", from_record),
    "arithmetic": _single("arithmetic", arithmetic),
    "tool_call": _with_tools("tool_call", call),
    "tool_bare": _with_tools("tool_bare", bare_call),
    "tool_calls": _with_tools("tool_calls", two_calls),
    "tool_none": _with_tools("tool_none", no_call),
    "tool_result": _with_tools("tool_result", result),
    "tool_error": _with_tools("tool_error", error),
    "tool_chain": _with_tools("tool_chain", chain),
    "tool_series": _with_tools("tool_series", series),
    "tool_call_renamed": _with_tools("tool_call_renamed", renamed(call)),
    "tool_calls_renamed": _with_tools("tool_calls_renamed", renamed(two_calls)),
    "tool_chain_renamed": _with_tools("tool_chain_renamed", renamed(chain)),
    "tool_series_renamed": _with_tools("tool_series_renamed", renamed(series)),
}

# Samples of each kind in every hundred or so, in the training from nothing. Kinds that copy from the prompt get the
# most: they are learned last.
MIXTURE: dict[str, float] = {
    "plan": 14,
    "expansion": 14,
    "expansion_after_plan": 6,
    "guide": 4,
    "article": 2.5,
    "direct": 5,
    "dialogue": 3,
    "long_dialogue": 0.4,
    "world": 3,
    "small_talk": 1.5,
    "object": 8,
    "reading": 9,
    "reading_series": 14,
    "repetition": 6,
    "to_json": 5,
    "from_json": 4,
    "arithmetic": 4,
}

TOOLS: dict[str, float] = {
    "tool_call": 15,
    "tool_bare": 3,
    "tool_calls": 5,
    "tool_none": 5,
    "tool_result": 5,
    "tool_error": 2,
    "tool_chain": 4,
    "tool_series": 6,
}
# The continued training, in which nearly half of the tokens are of conversations with tools.
TOOL_MIXTURE = MIXTURE | TOOLS
# The one after it, of nearly two thirds: which tool is meant, and which words go into the call, is learned last.
FURTHER_MIXTURE = TOOL_MIXTURE | {"tool_call": 40, "tool_calls": 10, "tool_chain": 8, "tool_series": 14}
# And further ones: a name that was not seen in training is taken from the list, not from habit.
RENAMED_MIXTURE = TOOL_MIXTURE | {
    "tool_call": 20, "tool_calls": 6, "tool_call_renamed": 25, "tool_calls_renamed": 6, "tool_chain_renamed": 4,
    "tool_series_renamed": 10,
}  # fmt: skip


def mixture_of(knows_tools: bool) -> Mapping[str, float]:
    """The mixture of the last training of a model that learned to use tools, or did not."""
    return TOOL_MIXTURE if knows_tools else MIXTURE


def stream(seed: int, held_out: bool = False, mixture: Mapping[str, float] = MIXTURE) -> Iterator[Sample]:
    """Endless samples of all kinds in the proportions of `mixture`; the same seed gives the same samples."""
    rng = random.Random(f"stream:{seed}:{held_out}")
    kinds, weights = list(mixture), list(mixture.values())
    while True:
        yield KINDS[rng.choices(kinds, weights)[0]](rng, held_out)


def held_out_conversations(seed: int, count: int, knows_tools: bool) -> list[Sample]:
    """`count` held-out conversations in the proportions of `MIXTURE`, and after them a quarter as many with tools if
    the model `knows_tools`: so figures of the former are of the same conversations whether it does or not."""
    talks = (sample for sample in stream(seed, held_out=True) if sample.messages)
    with_tools = stream(seed, held_out=True, mixture=TOOLS)
    return [*itertools.islice(talks, count), *itertools.islice(with_tools, count // 4 if knows_tools else 0)]


def held_out_cases(kind: str, count: int, seed: int = 0) -> list[Sample]:
    """`count` held-out samples of one kind with different prompts, always the same for one seed.

    Raises ValueError for an unknown kind, and where the kind has too few different prompts.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown, allowed are {', '.join(KINDS)}")
    rng = random.Random(f"cases:{kind}:{seed}")
    found: dict[str, Sample] = {}
    for _ in range(50 * count):
        sample = KINDS[kind](rng, True)
        found.setdefault(json.dumps(sample.prompt), sample)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"kind {kind!r} has only {len(found)} different held-out prompts, {count} were asked for")
