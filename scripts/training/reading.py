"""Copying exercises of the tiny corpus: questions about a text, repetition of words; the prompt holds the answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.language import (
    COLOURS,
    DAYS,
    FOODS,
    GOODS,
    JOBS,
    MONTHS,
    PETS,
    VEHICLES,
    WARES,
    people,
    person,
    places,
    with_article,
)

ASK = "Read the text and answer the question.\nText: {text}\nQuestion: {question}"


@dataclass(frozen=True)
class Fact:
    """A sentence of a text and a question that it answers."""

    sentence: str
    question: str


@dataclass(frozen=True)
class Exercise:
    """A prompt with its only right answer."""

    prompt: str
    answer: str


def _person_facts(rng: random.Random, held_out: bool) -> list[list[Fact]]:
    names = people(rng, held_out, rng.choice((2, 2, 3)))
    homes = places(rng, held_out, len(names))
    columns: list[Callable[[int, str], Fact]] = []
    jobs, foods, months = rng.sample(JOBS, 3), rng.sample(FOODS, 3), rng.sample(MONTHS, 3)
    goods, colours, pets = rng.sample(GOODS, 3), rng.sample(COLOURS, 3), rng.sample(PETS, 3)
    counts, pet_names = rng.sample(range(2, 100), 3), people(rng, held_out, 6)[-3:]
    columns = [
        lambda i, n: Fact(f"{n} lives in {homes[i]}.", f"Where does {n} live?"),
        lambda i, n: Fact(f"{n} works as {with_article(jobs[i])}.", f"What does {n} work as?"),
        lambda i, n: Fact(f"{n} likes to eat {foods[i]}.", f"What does {n} like to eat?"),
        lambda i, n: Fact(f"{n} has {counts[i]} {goods[i]}.", f"How many {goods[i]} does {n} have?"),
        lambda i, n: Fact(f"{n} wears a {colours[i]} coat.", f"What colour is the coat of {n}?"),
        lambda i, n: Fact(f"{n} has a {pets[i]} called {pet_names[i]}.", f"What is the name of the {pets[i]} of {n}?"),
        lambda i, n: Fact(f"{n} was born in {months[i]}.", f"In which month was {n} born?"),
    ]
    chosen = rng.sample(columns, rng.choice((1, 2, 2)))
    return [[column(i, name) for column in chosen] for i, name in enumerate(names)]


def _code_facts(rng: random.Random, held_out: bool) -> list[list[Fact]]:
    colours = rng.sample(COLOURS, rng.randint(3, 5))
    thing = rng.choice(("box", "door", "key", "bag"))
    return [
        [Fact(f"The code of the {colour} {thing} is {code}.", f"What is the code of the {colour} {thing}?")]
        for colour, code in zip(colours, rng.sample(range(100, 10000), len(colours)), strict=True)
    ]


def _trip_facts(rng: random.Random, held_out: bool) -> list[list[Fact]]:
    names = people(rng, held_out, 4)
    towns = places(rng, held_out, 4)
    days, vehicles = rng.sample(DAYS, 2), rng.sample(VEHICLES, 2)
    told = sorted(rng.sample(range(4), rng.choice((2, 3))))
    trips = [
        [
            Fact(f"{n} went from {start} to {goal}.", f"Where did {n} go?"),
            Fact(f"{n} took the {vehicles[i]}.", f"What did {n} take?"),
            Fact(f"{n} left on {days[i]}.", f"When did {n} leave?"),
            Fact(f"{n} met {friend} there.", f"Who did {n} meet there?"),
        ]
        for i, (n, friend, start, goal) in enumerate(
            [(names[0], names[1], towns[0], towns[1]), (names[2], names[3], towns[2], towns[3])]
        )
    ]
    return [[trip[column] for column in told] for trip in trips]


def _shop_facts(rng: random.Random, held_out: bool) -> list[list[Fact]]:
    owner = person(rng, held_out)
    wares = rng.sample(WARES, rng.randint(3, 5))
    return [
        [Fact(f"In the shop of {owner} the {ware} costs {price} coins.", f"What does the {ware} cost?")]
        for ware, price in zip(wares, rng.sample(range(2, 100), len(wares)), strict=True)
    ]


def _ship_facts(rng: random.Random, held_out: bool) -> list[list[Fact]]:
    ships, captains, harbours = people(rng, held_out, 2), people(rng, held_out, 2), places(rng, held_out, 2)
    cargo, colours, told = rng.sample(GOODS, 2), rng.sample(COLOURS, 2), rng.choice((2, 3, 4))
    return [
        [
            Fact(f"The ship {ship} sails to {harbours[i]}.", f"Where does the ship {ship} sail to?"),
            Fact(f"The captain of {ship} is {captains[i]}.", f"Who is the captain of {ship}?"),
            Fact(f"The cargo of {ship} is {cargo[i]}.", f"What is the cargo of {ship}?"),
            Fact(f"The colour of {ship} is {colours[i]}.", f"What is the colour of {ship}?"),
        ][:told]
        for i, ship in enumerate(ships)
    ]


SCENES = (_person_facts, _person_facts, _code_facts, _trip_facts, _shop_facts, _ship_facts)


def _text(rng: random.Random, held_out: bool) -> tuple[str, list[Fact]]:
    """A text about invented people, trips, shops, ships or codes, and its facts. Every name is from one side of the
    split."""
    groups = rng.choice(SCENES)(rng, held_out)
    rng.shuffle(groups)
    facts = [fact for group in groups for fact in group]
    return " ".join(fact.sentence for fact in facts), facts


def reading(rng: random.Random, held_out: bool) -> Exercise:
    """A text of two to eight facts and a question about one; the answer is the sentence of the text."""
    text, facts = _text(rng, held_out)
    fact = rng.choice(facts)
    return Exercise(ASK.format(text=text, question=fact.question), fact.sentence)


def reading_series(rng: random.Random, held_out: bool) -> list[Exercise]:
    """A text with two to five questions in turn, in one conversation: the text precedes the first question only,
    so that one text teaches several times."""
    text, facts = _text(rng, held_out)
    asked = rng.sample(facts, min(len(facts), rng.randint(2, 5)))
    prompts = [
        ASK.format(text=text, question=asked[0].question),
        *(f"Question: {fact.question}" for fact in asked[1:]),
    ]
    return [Exercise(prompt, fact.sentence) for prompt, fact in zip(prompts, asked, strict=True)]


def repetition(rng: random.Random, held_out: bool) -> Exercise:
    """Names, numbers or a sentence to be repeated letter by letter."""
    style = rng.randrange(3)
    if style == 0:
        words = people(rng, held_out, rng.randint(2, 6))
        return Exercise(f"Repeat these names: {', '.join(words)}", ", ".join(words))
    if style == 1:
        numbers = [str(rng.randrange(10 ** rng.randint(1, 5))) for _ in range(rng.randint(2, 6))]
        return Exercise(f"Repeat these numbers: {' '.join(numbers)}", " ".join(numbers))
    sentence = rng.choice(rng.choice(SCENES)(rng, held_out)[0]).sentence
    return Exercise(f"Repeat this sentence: {sentence}", sentence)
