"""Made-up tools for the tiny corpus: a few hundred names made of parts, with parameters that are drawn each time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from training.inventory import fields_of, is_held_out, lines_of
from training.language import fix_articles, with_article
from training.slots import DESCRIBED, SLOTS, Schema, invented_word

FILE = "tools.txt"
OPTIONAL_SAID = 0.5
"""How often a request says an optional parameter."""
INVENTED_NAME, INVENTED_KEYS = 0.1, 0.08
"""Shares of tools whose name says nothing, so that the description does, and whose parameters' names say nothing."""


@dataclass(frozen=True)
class Question:
    """A question that a tool answers.

    Attributes:
        noun: what is asked for, as in the tool's name.
        told: what the tool tells, as in its description.
        asks: wordings; {rest} is where clauses of optional slots are said.
        answer: the sentence that says the value of the result.
        value: the slot of which the value of the result is.
        reference: words that may be said instead of the value; "": none.
    """

    noun: str
    told: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    value: str
    reference: str = ""


@dataclass(frozen=True)
class Purpose:
    """What a tool is for.

    Attributes:
        verb, noun: make its name, and the request for something to be done.
        required, optional: slots of its parameters.
        question: what it answers; None: it does something.
    """

    verb: str
    noun: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    question: Question | None = None

    @property
    def key(self) -> str:
        return f"tool:{self.verb}:{self.noun}"


QUESTION_VERBS = ("get", "find", "show", "tell", "read", "ask", "check", "look_up")


def _names(field: str) -> tuple[str, ...]:
    return () if field == "-" else tuple(field.split(", "))


@cache
def _inventory() -> tuple[Purpose, ...]:
    """All purposes of the inventory. Raises ValueError (file and line) where it is not complete."""
    found: list[Purpose] = []
    asked: list[str] = []
    asks: tuple[str, ...] = ()
    for number, line in lines_of(FILE):
        mark, rest = line[0], line[1:].strip()
        if mark == "@":
            verbs, nouns, required, optional = map(_names, fields_of(FILE, number, rest, 4))
            found += [Purpose(verb, noun, required, optional) for verb in verbs for noun in nouns]
        elif mark == "?":
            asked, asks = fields_of(FILE, number, rest, 6), ()
        elif mark == "+":
            asks = tuple(rest.split(" / "))
        elif mark == "!" and asked and asks:
            noun, told, required, optional, value, reference = asked
            instead = "" if reference == "-" else reference
            question = Question(noun, told, _names(required), _names(optional), asks, rest, value, instead)
            found += [Purpose(verb, noun, question.required, question.optional, question) for verb in QUESTION_VERBS]
        else:
            raise ValueError(f"{FILE}:{number}: line starts with {mark!r} where that cannot be")
    return tuple(found)


@cache
def purposes(held_out: bool) -> tuple[Purpose, ...]:
    """All purposes of one side of the split."""
    return tuple(each for each in _inventory() if is_held_out(each.key) is held_out)


@dataclass(frozen=True)
class Tool:
    """A tool as a request describes it, and the slots of its parameters."""

    purpose: Purpose
    name: str
    description: str
    schema: Schema
    slots: dict[str, str]  # key -> slot

    @property
    def described(self) -> dict[str, Any]:
        """The tool as it comes in a request."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Use:
    """A request that a tool serves: the words, the arguments, and the words of what a question is about."""

    tool: Tool
    ask: str
    arguments: dict[str, Any]
    about: dict[str, str]


def make_tool(rng: random.Random, held_out: bool, purpose: Purpose) -> Tool:
    """A tool for a purpose. Keys, enumerations, and the optional parameters are drawn, so that they have to be read."""
    optional = [slot for slot in purpose.optional if rng.random() < 0.5]
    slots: dict[str, str] = {}
    is_invented, is_described = rng.random() < INVENTED_KEYS, rng.random() < DESCRIBED
    properties: Schema = {}
    chosen = [*purpose.required, *optional]
    if rng.random() < 0.2:
        rng.shuffle(chosen)
    for slot in chosen:
        key = invented_word(rng, held_out) if is_invented else rng.choice(SLOTS[slot].keys)
        if key in slots:
            key = next((each for each in SLOTS[slot].keys if each not in slots), f"{key}_2")
        slots[key] = slot
        properties[key] = SLOTS[slot].schema(rng)
        if is_invented or is_described:
            properties[key]["description"] = f"{SLOTS[slot].says}"
    schema: Schema = {"type": "object", "properties": properties}
    required = [key for key, slot in slots.items() if slot in purpose.required]
    if required:
        schema["required"] = required
    return Tool(purpose, _name(rng, held_out, purpose), _description(rng, purpose), schema, slots)


def _name(rng: random.Random, held_out: bool, purpose: Purpose) -> str:
    words = f"{purpose.verb}_{purpose.noun}".split("_")
    draw = rng.random()
    if draw < INVENTED_NAME:
        return f"{invented_word(rng, held_out)}_{invented_word(rng, held_out)}"
    if draw < 0.2:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    return ("-" if draw < 0.25 else "_").join(words)


def _description(rng: random.Random, purpose: Purpose) -> str:
    verb = purpose.verb.replace("_", " ").capitalize()
    if purpose.question is None:
        return f"{verb} {rng.choice((with_article(purpose.noun), f'the {purpose.noun}'))}."
    return f"{verb} {purpose.question.told}."


def use_of(
    rng: random.Random,
    held_out: bool,
    tool: Tool,
    said: Mapping[str, tuple[Any, str]] | None = None,
    optional: float = OPTIONAL_SAID,
) -> Use:
    """A request for a tool. `said` has values of slots with the words that say them; others are drawn, and optional
    ones are said at the rate `optional`."""
    arguments, words = {}, {}
    for key, slot in tool.slots.items():
        given = (said or {}).get(slot)
        if slot not in tool.purpose.required and given is None and rng.random() >= optional:
            continue
        value, words[slot] = SLOTS[slot].draw(rng, held_out, tool.schema["properties"][key])
        if given is not None:
            value, words[slot] = given
        arguments[key] = value
    if tool.purpose.question is not None:
        rest = [words[slot] for slot in tool.purpose.optional if slot in words]
        ask = rng.choice(tool.purpose.question.asks).format(**words, rest="".join(f" {clause}" for clause in rest))
        return Use(tool, ask, arguments, words)
    return Use(tool, _order(rng, tool.purpose, words), arguments, words)


def _order(rng: random.Random, purpose: Purpose, words: dict[str, str]) -> str:
    spots: dict[str, list[str]] = {}
    for slot, text in words.items():
        spots.setdefault(SLOTS[slot].spot, []).append(text)
    adjectives = " ".join([*spots.get("adjective", ()), purpose.noun])
    if "number" in spots:
        noun = f"{spots['number'][0]} {_plural(adjectives)}"
    else:
        noun = f"the {adjectives}" if purpose.required[:1] != ("receiver",) else with_article(adjectives)
    clauses = spots.get("clause", [])
    rng.shuffle(clauses)
    order = " ".join([f"{purpose.verb} {noun}", *spots.get("owner", ()), *clauses, *spots.get("last", ())])
    frame = rng.choice(("{}", "{}", "Please {}", "Can you {}", "I want you to {}", "Wick, {}"))
    text = fix_articles(frame.format(order))
    end = "" if text.endswith('"') else "?" if frame.startswith("Can") else "."
    return " ".join([text[0].upper() + text[1:] + end, *spots.get("sentence", ())])


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("ch", "x", "sh", "s")) else f"{noun}s"
