"""Samples whose names and things are made up anew: there are so many that they can only be copied from the prompt."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

from training.corpus import Sample, stream
from training.inventory import is_held_out
from training.language import COLOURS, ONSETS, PERSON_ENDS, PLACE_ENDS, VOWELS, with_article
from training.plans import Skeleton, Task
from training.settled import SETTLED_MIXTURE, settled

VARIED = 0.5
"""Share of the samples that are varied, where their kind can be."""
COPYING = {"reading", "reading_series", "repetition", "to_json", "from_json"}

_SYLLABLE = f"(?:{'|'.join(ONSETS)})[{''.join(VOWELS)}]"
_PERSON = rf"(?:{_SYLLABLE}){{2,3}}[{''.join(set(PERSON_ENDS))}]?"
_PLACE = rf"(?:{_SYLLABLE}){{1,2}}(?:{'|'.join(PLACE_ENDS)})"
_NAME = re.compile(rf"\b(?=[A-Z])(?i:{_PERSON}|{_PLACE})\b")


def varied_stream(seed: int, held_out: bool = False) -> Iterator[Sample]:
    """Endless `settled` samples in the proportions of `SETTLED_MIXTURE`, half of them `varied`."""
    rng = random.Random(f"varied:{seed}:{held_out}")
    for sample in stream(seed, held_out, SETTLED_MIXTURE):
        yield settled(varied(sample, rng) if rng.random() < VARIED else sample)


def varied(sample: Sample, rng: random.Random) -> Sample:
    """A sample with another thing and another reader in its task, or other names in what is to be copied; the sample
    itself where it has neither. The answer is right for the new ones: a thing is of the old one's sort, such as a green
    kettle or a Tastoru kettle for a kettle."""
    task, skeleton = sample.task, sample.skeleton
    if task is not None and skeleton is not None:
        sort = rng.choice(COLOURS) if rng.random() < 0.5 else invented(rng)
        new = {task.thing.name: f"{sort} {task.thing.name}"}
        if task.reader:
            new[task.reader] = invented(rng)
        task = Task(task.action, replace(task.thing, name=new[task.thing.name]), new.get(task.reader, ""))
        skeleton = Skeleton(task, skeleton.points, skeleton.counts)
    elif sample.kind in COPYING:
        found = {name for message in sample.messages for name in _NAME.findall(message["content"])}
        new = {name: invented(rng) for name in sorted(found)}
    else:
        return sample
    messages = tuple(message | {"content": _replaced(message["content"], new)} for message in sample.messages)
    return replace(sample, messages=messages, text=_replaced(sample.text, new), task=task, skeleton=skeleton)


def invented(rng: random.Random) -> str:
    """A name such as "Klotubredal", from the side of the split that is trained on."""
    while True:
        syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 3, 3, 4)))]
        name = ("".join(syllables) + rng.choice(PERSON_ENDS)).capitalize()
        if not any(is_held_out(f"name:{kind}:{name}") for kind in ("person", "place")):
            return name


def _replaced(text: str, new: dict[str, str]) -> str:
    """The text with new words for old ones, and the articles that they take."""
    if not new:
        return text
    words = "|".join(map(re.escape, sorted(new, key=len, reverse=True)))
    return re.sub(
        rf"\b(an? )?({words})\b", lambda found: with_article(new[found[2]]) if found[1] else new[found[2]], text
    )
