"""Words for the tiny corpus: invented names that cannot be memorised, small closed lists, articles."""

from __future__ import annotations

import random
import re

from training.inventory import is_held_out

ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "gr", "kl", "st", "tr")
VOWELS = ("a", "e", "i", "o", "u")
PERSON_ENDS = ("", "", "n", "l", "s", "r")
PLACE_ENDS = ("mor", "wick", "stad", "holm", "fell", "burg", "dale", "ton")

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey", "purple", "orange", "pink", "golden")
JOBS = ("baker", "sailor", "teacher", "painter", "doctor", "farmer", "tailor", "miller", "pilot", "singer", "weaver",
        "gardener")  # fmt: skip
GOODS = ("lamps", "chairs", "apples", "books", "drums", "kites", "stones", "coins", "shells", "candles", "boxes",
         "bottles", "plates", "ropes", "stamps", "buttons")  # fmt: skip
WARES = ("lamp", "chair", "book", "drum", "kite", "clock", "kettle", "guitar", "tent", "bench", "radio", "puppet")
FOODS = ("soup", "bread", "rice", "honey", "cheese", "fish", "plums", "noodles", "beans", "cake")
PETS = ("dog", "cat", "goat", "pony", "parrot", "rabbit", "duck", "donkey")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
VEHICLES = ("train", "bus", "ferry", "bicycle", "tram", "car")
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")


def _word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables))


def _name(rng: random.Random, held_out: bool, kind: str, ends: tuple[str, ...], syllables: tuple[int, ...]) -> str:
    while True:
        name = (_word(rng, rng.choice(syllables)) + rng.choice(ends)).capitalize()
        if is_held_out(f"name:{kind}:{name}") is held_out:
            return name


def person(rng: random.Random, held_out: bool) -> str:
    """A name of two or three syllables, such as "Tavi" or "Brelodan", from one side of the split."""
    return _name(rng, held_out, "person", PERSON_ENDS, (2, 2, 3))


def place(rng: random.Random, held_out: bool) -> str:
    """A place name such as "Dumowick", from one side of the split."""
    return _name(rng, held_out, "place", PLACE_ENDS, (1, 2))


def people(rng: random.Random, held_out: bool, count: int) -> list[str]:
    """`count` different names."""
    names: list[str] = []
    while len(names) < count:
        name = person(rng, held_out)
        if name not in names:
            names.append(name)
    return names


def places(rng: random.Random, held_out: bool, count: int) -> list[str]:
    """`count` different places."""
    names: list[str] = []
    while len(names) < count:
        name = place(rng, held_out)
        if name not in names:
            names.append(name)
    return names


def with_article(noun: str) -> str:
    """Such as "a kite" or "an umbrella"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def fix_articles(text: str) -> str:
    """Turn "a" into "an" before a vowel; "a one" and "a used" keep their "a"."""
    return re.sub(r"\b([Aa]) (?=[aeiou])(?!one\b|used\b|uni)", r"\1n ", text)
