"""Conversations with tools of the tiny corpus: calls, answers from results, errors, chains, and questions without."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from training.chat import CHATTY, HELPER_SYSTEM
from training.language import DAYS, MONTHS, person, place
from training.reading import Exercise, reading
from training.records import arithmetic, from_record
from training.slots import SLOTS
from training.toolbox import Purpose, Tool, Use, make_tool, purposes, use_of

Message = dict[str, Any]
BEFORE = 0.15
"""Share of conversations with an exchange before the one that matters."""
OF_SYSTEM = 0.15
"""Share of conversations with a system prompt beside the tools."""
PLAIN = (*CHATTY, arithmetic, from_record, reading)


@dataclass(frozen=True)
class ToolTalk:
    """A conversation as a request has it, which ends with the answer; `used` is what this must take from a result."""

    tools: tuple[dict[str, Any], ...]
    messages: tuple[Message, ...]
    used: tuple[str, ...] = ()


@dataclass(frozen=True)
class Round:
    """Uses of tools in one answer, with their results, and what is said about these."""

    calls: Message
    results: tuple[Message, ...]
    answer: str
    used: tuple[str, ...]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _exchange(exercise: Exercise) -> list[Message]:
    return [_user(exercise.prompt), _assistant(exercise.answer)]


def _calls(uses: Sequence[Use], first: int = 0) -> Message:
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": use.tool.name, "arguments": use.arguments}}
        for number, use in enumerate(uses, start=first)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _opening(rng: random.Random, held_out: bool) -> list[Message]:
    """What comes before the request: sometimes a system prompt, sometimes an exchange."""
    messages = [{"role": "system", "content": HELPER_SYSTEM}] if rng.random() < OF_SYSTEM else []
    if rng.random() < BEFORE:
        messages += _exchange(rng.choice(CHATTY)(rng, held_out))
    return messages


def _draw(rng: random.Random, held_out: bool, has_parameters: bool | None = None) -> Tool:
    """A tool: half of them answer questions. `has_parameters` asks for some, or for none."""
    is_question = rng.random() < 0.5
    pool = [
        each
        for each in purposes(held_out)
        if (each.question is not None) is is_question and has_parameters in (None, bool(each.required))
    ]
    return make_tool(rng, held_out, rng.choice(pool))


def _with_others(rng: random.Random, held_out: bool, needed: Sequence[Tool], counts: Sequence[int]) -> list[Tool]:
    """The tools in any order with others, so that they are `counts` in all. Others answer other questions; half of
    them do the same with something else, or something else with the same."""
    tools = list(needed)
    size = max(rng.choice(counts), len(tools))
    while len(tools) < size:
        keys = {each.purpose.key for each in tools}
        questions = {each.purpose.question for each in tools} - {None}
        pool = [each for each in purposes(held_out) if each.key not in keys and each.question not in questions]
        near = {word for each in tools for word in (each.purpose.verb, each.purpose.noun)}
        alike = [each for each in pool if {each.verb, each.noun} & near]
        tool = make_tool(rng, held_out, rng.choice(alike if alike and rng.random() < 0.5 else pool))
        if tool.name not in {each.name for each in tools}:
            tools.append(tool)
    rng.shuffle(tools)
    return tools


def _talk(tools: Sequence[Tool], messages: Sequence[Message], used: tuple[str, ...] = ()) -> ToolTalk:
    return ToolTalk(tuple(tool.described for tool in tools), tuple(messages), used)


def call(rng: random.Random, held_out: bool) -> ToolTalk:
    """One call, to one of one to four tools, with arguments from the request."""
    tool = _draw(rng, held_out, has_parameters=True)
    tools = _with_others(rng, held_out, [tool], (1, 2, 2, 3, 3, 4))
    use = use_of(rng, held_out, tool)
    return _talk(tools, [*_opening(rng, held_out), _user(use.ask), _calls([use])])


def bare_call(rng: random.Random, held_out: bool) -> ToolTalk:
    """A call without arguments."""
    tool = _draw(rng, held_out, has_parameters=False)
    tools = _with_others(rng, held_out, [tool], (1, 2, 3, 4))
    use = use_of(rng, held_out, tool)
    return _talk(tools, [*_opening(rng, held_out), _user(use.ask), _calls([use])])


def _two(rng: random.Random, held_out: bool) -> tuple[list[Tool], list[Use]]:
    """Two uses, of one tool or of two, with the tools that there are."""
    first = _draw(rng, held_out, has_parameters=True)
    tools = _with_others(rng, held_out, [first], (1, 2, 2, 3))
    second = rng.choice(tools)
    is_same = second is first or not second.slots
    return tools, [use_of(rng, held_out, first), use_of(rng, held_out, first if is_same else second)]


def two_calls(rng: random.Random, held_out: bool) -> ToolTalk:
    """Two calls in one answer, to one tool or to two."""
    tools, uses = _two(rng, held_out)
    return _talk(tools, [*_opening(rng, held_out), _user(" ".join(use.ask for use in uses)), _calls(uses)])


def no_call(rng: random.Random, held_out: bool) -> ToolTalk:
    """A question that none of the tools is for: it has its answer as without them."""
    tools = _with_others(rng, held_out, [_draw(rng, held_out)], (1, 2, 3, 4))
    return _talk(tools, [*_opening(rng, held_out), *_exchange(rng.choice(PLAIN)(rng, held_out))])


VALUES: dict[str, Callable[[random.Random, bool], Any]] = {
    "price": lambda rng, held_out: rng.randint(2, 99) + (0.5 if rng.random() < 0.2 else 0),
    "who": person,
    "where": place,
    "count": lambda rng, held_out: rng.randint(2, 99),
    "many": lambda rng, held_out: rng.randint(100, 9999),
    "hour": lambda rng, held_out: rng.randint(1, 24),
    "day": lambda rng, held_out: rng.choice(DAYS),
    "month": lambda rng, held_out: rng.choice(MONTHS),
    "tide": lambda rng, held_out: rng.choice(("high", "low")),
    "weather": lambda rng, held_out: rng.choice(("fine", "cold", "bad", "warm", "dry", "windy")),
}
DONE = {"number": "many", "price": "price", "day": "day", "hour": "hour", "helper": "who", "place": "where"}
"""What may be told about something that was done, and its values."""
TROUBLE = (
    "There is no boat in {place}.",
    "{person} is not at home.",
    "The road to {place} is closed.",
    "The code {number} is wrong.",
    "The shop is closed on {day}.",
    "Only {number} coins are left.",
)


def _result_of(rng: random.Random, held_out: bool, use: Use) -> tuple[str, str, tuple[str, ...]]:
    """The content of a result, what is said about it, and what of it must be said."""
    question = use.tool.purpose.question
    if question is None:
        if rng.random() < 0.3:
            return rng.choice(("done", json.dumps({"ok": True}), json.dumps({"status": "done"}))), "Done.", ()
        noun, kind = rng.choice(list(DONE.items()))
        value = VALUES[kind](rng, held_out)
        return json.dumps({"ok": True, noun: value}), f"Done. The {noun} is {value}.", (str(value),)
    value = VALUES[question.value](rng, held_out)
    answer = question.answer.format(**use.about, value=value)
    return _value_written(rng, held_out, use, question.noun, value), answer, (str(value),)


def _value_written(rng: random.Random, held_out: bool, use: Use, noun: str, value: Any) -> str:
    """A value as a result: bare, or as a record, which may have more fields."""
    draw = rng.random()
    if draw < 0.2:
        return str(value)
    record = {noun: value}
    if draw < 0.6:
        more, kind = rng.choice([each for each in DONE.items() if each[0] != noun])
        given = {key: each for key, each in use.arguments.items() if key != noun}
        record = given | record if rng.random() < 0.5 else {more: VALUES[kind](rng, held_out)} | record
        if rng.random() < 0.5:
            record = dict(sorted(record.items(), key=lambda field: field[0] != noun))
    return json.dumps(record)


def _trouble_of(rng: random.Random, held_out: bool) -> tuple[str, str, tuple[str, ...]]:
    """What `_result_of` gives, of a call that failed."""
    words = {"place": place(rng, held_out), "person": person(rng, held_out)}
    text = rng.choice(TROUBLE).format(**words, number=rng.randint(2, 999), day=rng.choice(DAYS))
    content = rng.choice((json.dumps({"error": text}), json.dumps({"ok": False, "error": text}), f"Error: {text}"))
    return content, f"That did not work. {text}", (text.removesuffix("."),)


def _round(rng: random.Random, held_out: bool, uses: Sequence[Use], first: int = 0, fails: bool = False) -> Round:
    found = [_trouble_of(rng, held_out) if fails else _result_of(rng, held_out, use) for use in uses]
    results = tuple(
        {"role": "tool", "tool_call_id": f"call_{number}", "content": content}
        for number, (content, _, _) in enumerate(found, start=first)
    )
    answer = " ".join(dict.fromkeys(said for _, said, _ in found))
    return Round(_calls(uses, first), results, answer, tuple(word for _, _, words in found for word in words))


def result(rng: random.Random, held_out: bool) -> ToolTalk:
    """The answer after one result, or after two."""
    if rng.random() < 0.2:
        tools, uses = _two(rng, held_out)
    else:
        tool = _draw(rng, held_out)
        tools, uses = _with_others(rng, held_out, [tool], (1, 1, 2, 3)), [use_of(rng, held_out, tool)]
    done = _round(rng, held_out, uses)
    asked = [*_opening(rng, held_out), _user(" ".join(use.ask for use in uses))]
    return _talk(tools, [*asked, done.calls, *done.results, _assistant(done.answer)], done.used)


def error(rng: random.Random, held_out: bool) -> ToolTalk:
    """The answer after a result that is an error."""
    tool = _draw(rng, held_out)
    tools, use = _with_others(rng, held_out, [tool], (1, 1, 2, 3)), use_of(rng, held_out, tool)
    done = _round(rng, held_out, [use], fails=True)
    asked = [*_opening(rng, held_out), _user(use.ask)]
    return _talk(tools, [*asked, done.calls, *done.results, _assistant(done.answer)], done.used)


REFERRED = {"who": ("receiver", "owner"), "where": ("town", "goal", "start")}
"""Slots whose value may be what a question asks for."""


def chain(rng: random.Random, held_out: bool) -> ToolTalk:
    """A second call with the result of the first, such as a letter to a captain whose name was asked for."""
    sought, purpose = rng.choice(_chained(held_out))
    asking, acting = make_tool(rng, held_out, sought), make_tool(rng, held_out, purpose)
    question = sought.question
    assert question is not None
    slots = REFERRED[question.value]
    slot = next(slot for slot in purpose.required if slot in slots)
    found, value = use_of(rng, held_out, asking, optional=0.0), VALUES[question.value](rng, held_out)
    words = SLOTS[slot].clause
    assert isinstance(words, str)
    use = use_of(rng, held_out, acting, {slot: (value, words.format(question.reference.format(**found.about)))})
    content = _value_written(rng, held_out, found, question.noun, value)
    messages = [
        *_opening(rng, held_out),
        _user(use.ask),
        _calls([found]),
        {"role": "tool", "tool_call_id": "call_0", "content": content},
        _calls([use], 1),
    ]
    return _talk(_with_others(rng, held_out, [asking, acting], (2, 2, 3)), messages)


@cache
def _chained(held_out: bool) -> tuple[tuple[Purpose, Purpose], ...]:
    """Pairs of a question and of what may be done with what it asks for."""
    asking = [each for each in purposes(held_out) if each.question is not None and each.question.reference]
    acting = [each for each in purposes(held_out) if each.question is None]
    return tuple(
        (first, second)
        for first in asking
        for second in acting
        if first.question is not None and set(REFERRED[first.question.value]) & set(second.required)
    )


def series(rng: random.Random, held_out: bool) -> ToolTalk:
    """Two or three requests in turn with the same tools, so that one list of them teaches several times."""
    tools = _with_others(rng, held_out, [_draw(rng, held_out, has_parameters=True)], (2, 3, 3, 4))
    messages = [{"role": "system", "content": HELPER_SYSTEM}] if rng.random() < OF_SYSTEM else []
    used: tuple[str, ...] = ()
    for number in range(rng.choice((2, 2, 3))):
        if rng.random() < 0.2:
            messages += _exchange(rng.choice(CHATTY)(rng, held_out))
            used = ()
            continue
        use = use_of(rng, held_out, rng.choice(tools))
        done = _round(rng, held_out, [use], number, fails=rng.random() < 0.15)
        messages += [_user(use.ask), done.calls, *done.results, _assistant(done.answer)]
        used = done.used
    return _talk(tools, messages, used)
