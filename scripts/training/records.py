"""Records and sums of the tiny corpus: text to JSON, questions about JSON, small arithmetic."""

from __future__ import annotations

import json
import random

from training.inventory import is_held_out
from training.language import COLOURS, DAYS, GOODS, JOBS, WARES, person, place, with_article
from training.reading import Exercise

Value = str | int


def _boat(rng: random.Random, held_out: bool) -> tuple[str, dict[str, Value]]:
    name, owner, colour, length = person(rng, held_out), person(rng, held_out), rng.choice(COLOURS), rng.randint(3, 99)
    text = f"The boat {name} is {colour}, it is {length} feet long and it belongs to {owner}."
    return text, {"kind": "boat", "name": name, "color": colour, "length": length, "owner": owner}


def _person(rng: random.Random, held_out: bool) -> tuple[str, dict[str, Value]]:
    name, age, job, home = person(rng, held_out), rng.randint(8, 99), rng.choice(JOBS), place(rng, held_out)
    text = f"{name} is {age} years old, works as {with_article(job)} and lives in {home}."
    return text, {"kind": "person", "name": name, "age": age, "job": job, "home": home}


def _order(rng: random.Random, held_out: bool) -> tuple[str, dict[str, Value]]:
    customer, count, goods, day = person(rng, held_out), rng.randint(2, 99), rng.choice(GOODS), rng.choice(DAYS)
    text = f"{customer} orders {count} {goods} for {day}."
    return text, {"kind": "order", "customer": customer, "goods": goods, "count": count, "day": day}


def _offer(rng: random.Random, held_out: bool) -> tuple[str, dict[str, Value]]:
    seller, ware, colour, price = person(rng, held_out), rng.choice(WARES), rng.choice(COLOURS), rng.randint(2, 99)
    text = f"{seller} sells a {colour} {ware} for {price} coins."
    return text, {"kind": "offer", "seller": seller, "item": ware, "color": colour, "price": price}


RECORDS = (_boat, _person, _order, _offer)


def to_record(rng: random.Random, held_out: bool) -> Exercise:
    """One sentence, to be written as one JSON object."""
    text, record = rng.choice(RECORDS)(rng, held_out)
    return Exercise(f"Write this as JSON: {text}", json.dumps(record))


def from_record(rng: random.Random, held_out: bool) -> Exercise:
    """One JSON object and a question about one of its fields; the answer is the bare value."""
    _, record = rng.choice(RECORDS)(rng, held_out)
    field = rng.choice([key for key in record if key != "kind"])
    return Exercise(f"Record: {json.dumps(record)}\nWhat is the {field}?", str(record[field]))


def arithmetic(rng: random.Random, held_out: bool) -> Exercise:
    """A sum or difference below 100, or a product of one-digit numbers, bare or as a story."""
    while True:
        operator = rng.choice("++--*")
        top = 10 if operator == "*" else 50
        left, right = rng.randrange(top), rng.randrange(top)
        if operator == "-":
            left, right = max(left, right), min(left, right)
        if is_held_out(f"sum:{left}{operator}{right}") is held_out:
            break
    result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    if operator == "*" or rng.random() < 0.6:
        ask = rng.choice(("What is {}?", "Calculate {}.")).format(f"{left} {operator} {right}")
        return Exercise(ask, f"{left} {operator} {right} = {result}")
    name, goods = person(rng, held_out), rng.choice(GOODS)
    change = f"gets {right} more" if operator == "+" else f"gives away {right}"
    ask = f"{name} has {left} {goods} and {change}. How many {goods} does {name} have now?"
    return Exercise(ask, f"{left} {operator} {right} = {result}, so {name} has {result} {goods}.")
