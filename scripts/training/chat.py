"""Conversations of the tiny corpus: small talk, the small world, facts about objects, long mixed dialogues."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.inventory import Exchange, Thing, exchanges, is_held_out, things
from training.language import person, with_article
from training.plans import PLAN_SYSTEM
from training.reading import Exercise, reading, repetition
from training.records import arithmetic, from_record, to_record

PREFIXES = ("", "", "", "Please tell me: ", "I have a question. ", "Wick, ")
HELPER_SYSTEM = "You are Wick, a friendly helper from Lantern Bay."
NAME_INTRODUCTIONS = ("My name is {}.", "I am {}.", "Hello, my name is {}.", "You can call me {}.")
NAME_QUESTIONS = ("What is my name?", "Do you know my name?", "Who am I?")
_LOWERED_AFTER = ("Please tell me: ", "Wick, ")


def _world_choice(rng: random.Random, held_out: bool) -> tuple[Exchange, str]:
    """A fact of the small world and a way to ask for it; a tenth of the (question, prefix) pairs is held out."""
    while True:
        fact = rng.choice(exchanges("world.txt"))
        ask, prefix = rng.choice(fact.asks), rng.choice(PREFIXES)
        if is_held_out(f"world:{prefix}{ask}") is held_out:
            lowered = prefix in _LOWERED_AFTER and not ask.startswith(("I ", "Lantern", "Pebble", "Heron"))
            return fact, prefix + (ask[0].lower() + ask[1:] if lowered else ask)


def world_question(rng: random.Random, held_out: bool) -> Exercise:
    """A question about the small world; every fact has one answer."""
    fact, ask = _world_choice(rng, held_out)
    return Exercise(ask, fact.answers[0])


def small_talk(rng: random.Random, held_out: bool) -> Exercise:
    talk = rng.choice(exchanges("smalltalk.txt"))
    return Exercise(rng.choice(talk.asks), rng.choice(talk.answers))


def _about(thing: Thing) -> tuple[tuple[str, str], ...]:
    one, name = with_article(thing.name), thing.name
    match thing.kind:
        case "thing":
            return (
                (f"Name two parts of {one}.", f"Two parts of {one} are the {thing.first} and the {thing.second}."),
                (f"What is {one} made of?", f"Most often it is made of {thing.third}."),
            )
        case "plant":
            return (
                (f"What grows in {one}?", f"In {one} you will find {thing.first}."),
                (f"Where do I put {one}?", f"A good spot for it is near the {thing.third}."),
                (f"What do I need for {one}?", f"Besides patience you need the {thing.second}."),
            )
        case "food":
            return (
                (f"What goes into {one}?", f"You need {thing.first} and {thing.second}."),
                (f"In what do I make {one}?", f"You make it in the {thing.third}."),
            )
        case "event":
            return (
                (f"What do I need for {one}?", f"You need the {thing.first} and the {thing.second}."),
                (f"Where can {one} take place?", f"It can take place in the {thing.third}."),
            )
        case "text":
            return (
                (f"What belongs into {one}?", f"Good {thing.first} and {thing.second} belong into it."),
                (f"Who reads {one}?", f"It is made for {thing.third}."),
            )
        case "place":
            return (
                (f"What can I see at the {name}?", f"You can see the {thing.first} and the {thing.second}."),
                (f"How do I get to the {name}?", f"The best way is the {thing.third}."),
            )
        case "skill":
            return (
                (f"What do I learn in {name}?", f"You learn about {thing.first} and {thing.second}."),
                (f"What do I need for {name}?", f"You need the {thing.third}."),
            )
        case "animal":
            return (
                (f"What does {one} eat?", f"It likes {thing.first} best."),
                (f"Where does {one} sleep?", f"It sleeps in the {thing.third}."),
                (f"What do I buy for {one}?", f"Buy the {thing.second} first."),
            )
    raise ValueError(f"class {thing.kind!r} of {thing.name!r} is unknown, allowed are {sorted(things())}")


def object_question(rng: random.Random, held_out: bool) -> Exercise:
    """What an object is made of, what one needs for it, and the like."""
    ask, answer = rng.choice(_about(rng.choice(things()[rng.choice(sorted(things()))])))
    return Exercise(ask, answer)


SINGLE_TURNS: tuple[Callable[[random.Random, bool], Exercise], ...] = (
    world_question,
    world_question,
    small_talk,
    object_question,
    object_question,
    arithmetic,
    reading,
    from_record,
    to_record,
    repetition,
)
CHATTY = SINGLE_TURNS[:5]


def turns(exercises: list[Exercise]) -> list[dict[str, str]]:
    """Messages of a conversation in which the exercises follow each other."""
    messages = []
    for exercise in exercises:
        messages.append({"role": "user", "content": exercise.prompt})
        messages.append({"role": "assistant", "content": exercise.answer})
    return messages


def conversation(rng: random.Random, held_out: bool, length: int) -> list[dict[str, str]]:
    """A dialogue of `length` exchanges of all sorts. In half of them the user says a name at the start and asks for it
    at the end."""
    exercises = [rng.choice(SINGLE_TURNS)(rng, held_out) for _ in range(length)]
    if rng.random() < 0.5:
        name = person(rng, held_out)
        exercises[0] = Exercise(rng.choice(NAME_INTRODUCTIONS).format(name), f"Nice to meet you, {name}.")
        exercises.append(Exercise(rng.choice(NAME_QUESTIONS), f"Your name is {name}."))
    system = [{"role": "system", "content": HELPER_SYSTEM}] if rng.random() < 0.3 else []
    return system + turns(exercises)


def direct(rng: random.Random, held_out: bool) -> list[dict[str, str]]:
    """A request that needs no plan, under the plan protocol."""
    exercise = rng.choice((*CHATTY, arithmetic))(rng, held_out)
    return [
        {"role": "system", "content": PLAN_SYSTEM},
        {"role": "user", "content": exercise.prompt},
        {"role": "assistant", "content": tagged(exercise.answer)},
    ]


def tagged(answer: str) -> str:
    """An answer that needs no plan, as the plan protocol has it."""
    return f"[DIRECT]\n{answer}\n[END]"


def untagged(answer: str) -> str:
    """What `tagged` was given; an answer without tags, as it is."""
    return answer.removeprefix("[DIRECT]\n").removesuffix("\n[END]")
