"""Parameters of made-up tools: what they may be called, their schemas, and values with the words that ask for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.inventory import is_held_out
from training.language import COLOURS, DAYS, GOODS, MONTHS, NUMBER_WORDS, ONSETS, VOWELS, people, person, place
from training.reading import SCENES

Schema = dict[str, Any]
Draw = Callable[[random.Random, bool], str]
DESCRIBED = 0.2
"""Share of tools whose parameters have descriptions."""
TWO_WORDS = 0.08
"""Share of names with a space."""


@dataclass(frozen=True)
class Slot:
    """A kind of parameter.

    Attributes:
        keys: names that it may have.
        says: its description.
        clause: how a request says it, with {} for the value; of a boolean, the sentences for true and for false.
        values: a function that draws a name; words to choose from; a range of numbers; or the type of the value.
        spot: where a request says it: "number" and "adjective" before the noun, "owner" right after it, "clause" in
            any order after that, "last" at the end of the sentence, "sentence" after it.
    """

    keys: tuple[str, ...]
    says: str
    clause: str | tuple[str, str]
    values: Draw | tuple[str, ...] | range | str
    spot: str = "clause"

    def schema(self, rng: random.Random) -> Schema:
        """A schema of this parameter. Words to choose from are often an enumeration of some of them."""
        match self.values:
            case tuple() if rng.random() < 0.6:
                few = sorted(rng.sample(range(len(self.values)), rng.randint(2, 4)))
                return {"type": "string", "enum": [self.values[index] for index in few]}
            case range():
                return {"type": "integer"}
            case "number" | "boolean":
                return {"type": self.values}
            case "names" | "goods":
                return {"type": "array", "items": {"type": "string"}}
        return {"type": "string"}

    def draw(self, rng: random.Random, held_out: bool, schema: Schema) -> tuple[Any, str]:
        """A value by a schema of this parameter, and the words of a request that say it."""
        value = self._value(rng, held_out, schema)
        if isinstance(self.clause, tuple):
            return value, self.clause[0] if value else self.clause[1]
        if isinstance(value, list):
            return value, self.clause.format(f"{', '.join(value[:-1])} and {value[-1]}")
        return value, self.clause.format(value)

    def _value(self, rng: random.Random, held_out: bool, schema: Schema) -> Any:
        match self.values:
            case tuple():
                return rng.choice(schema.get("enum", self.values))
            case range():
                return rng.choice(self.values)
            case "number":
                return rng.randint(2, 99) + (0.5 if rng.random() < 0.3 else 0)
            case "boolean":
                return rng.random() < 0.6
            case "names":
                return people(rng, held_out, rng.randint(2, 3))
            case "goods":
                return rng.sample(GOODS, rng.randint(2, 3))
            case "text":
                return _text(rng, held_out)
            case str():
                raise ValueError(f"values {self.values!r} are unknown")
        name = self.values(rng, held_out)
        return f"{name} {person(rng, held_out)}" if rng.random() < TWO_WORDS else name


def _text(rng: random.Random, held_out: bool) -> str:
    if rng.random() < 0.3:
        return f"{rng.choice(NUMBER_WORDS[2:])} {rng.choice(COLOURS)} {rng.choice(GOODS)}"
    return rng.choice(rng.choice(SCENES)(rng, held_out)[0]).sentence


SLOTS: dict[str, Slot] = {
    "receiver": Slot(("to", "receiver", "person", "name"), "the receiver", "to {}", person),
    "sender": Slot(("from", "sender", "giver"), "the sender", "from {}", person),
    "guest": Slot(("for", "guest", "name", "customer"), "the guest", "for {}", person),
    "owner": Slot(("owner", "of", "person", "name"), "the owner", "of {}", person, "owner"),
    "shop": Slot(("shop", "seller", "from"), "the seller", "from {}", person),
    "town": Slot(("town", "place", "city", "where"), "the town", "in {}", place),
    "goal": Slot(("to", "goal", "town", "harbour"), "the goal", "to {}", place),
    "start": Slot(("from", "start", "origin"), "the start", "from {}", place),
    "day": Slot(("day", "date", "when"), "the day", "on {}", DAYS),
    "month": Slot(("month", "date", "when"), "the month", "in {}", MONTHS),
    "colour": Slot(("color", "colour", "paint"), "the color", "{}", COLOURS, "adjective"),
    "paint": Slot(("color", "colour", "paint"), "the color", "{}", COLOURS, "owner"),
    "size": Slot(("size", "kind"), "the size", "{}", ("small", "big", "tiny", "wide", "long", "short"), "adjective"),
    "count": Slot(("count", "amount", "number"), "how many", "{}", range(2, 100), "number"),
    "hour": Slot(("hour", "time", "at"), "the hour", "at {}", range(1, 25)),
    "code": Slot(("code", "key", "number"), "the code", "with the code {}", range(100, 10000)),
    "seats": Slot(("seats", "people", "count"), "how many people", "for {} people", range(2, 30)),
    "price": Slot(("price", "coins", "cost"), "the price", "for {} coins", "number"),
    "urgent": Slot(("urgent", "fast"), "is it urgent", ("It is urgent.", "It is not urgent."), "boolean", "sentence"),
    "paid": Slot(("paid", "is_paid"), "is it paid", ("It is paid.", "It is not paid."), "boolean", "sentence"),
    "gift": Slot(("gift", "is_gift"), "is it a gift", ("It is a gift.", "It is no gift."), "boolean", "sentence"),
    "guests": Slot(("guests", "names", "people"), "the guests", "with {}", "names"),
    "items": Slot(("items", "goods", "load"), "the goods", "with {}", "goods"),
    "text": Slot(("text", "note", "message"), "the text", 'with the text "{}"', "text", "last"),
    "title": Slot(("name", "title"), "the new name", "{}", person, "owner"),
    # What questions are about: they say it in words of their own.
    "ware": Slot(("item", "ware", "name"), "the item", "{}", ("lamp", "chair", "book", "drum", "kite", "clock",
                 "kettle", "guitar", "tent", "bench", "radio", "puppet"), "about"),
    "ship": Slot(("ship", "boat", "name"), "the ship", "{}", person, "about"),
    "who": Slot(("person", "name", "of"), "the person", "{}", person, "about"),
    "where": Slot(("town", "place", "city"), "the town", "{}", place, "about"),
    "goods": Slot(("goods", "item", "kind"), "the goods", "{}", GOODS, "about"),
    "from": Slot(("from", "start", "origin"), "the start", "{}", place, "about"),
    "to": Slot(("to", "goal", "harbour"), "the goal", "{}", place, "about"),
    "box": Slot(("color", "colour", "kind"), "the color", "{}", COLOURS, "about"),
}  # fmt: skip


def invented_word(rng: random.Random, held_out: bool) -> str:
    """A lower-case word such as "brelo", from one side of the split."""
    while True:
        word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2))
        if is_held_out(f"word:{word}") is held_out:
            return word
