"""Texts for an EAGLE-3 head beside the corpus's: held-out answers of a target, and answers to prompts from a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinfer import LLM, RequestOutput, SamplingParams
from training.corpus import Messages, held_out_conversations
from training.distillation import HELD_OUT_SEED, MAX_TOKENS
from training.packing import Document

TEMPERATURES = (0.0, 0.8)
"""At which a target answers one prompt after the other."""


@dataclass(frozen=True)
class HeldOut:
    """Texts that training never sees, with the target's greedy answers, of which all but the first token count as
    written: that one comes with the prompt and is not drafted. `kinds` has the kind of each."""

    kinds: tuple[str, ...]
    documents: tuple[Document, ...]


def held_out_texts(llm: LLM, count: int, longest: int, knows_tools: bool) -> HeldOut:
    """Answers to `count` held-out prompts of the corpus, and to further ones with tools if the target `knows_tools`,
    but for those whose text is longer than `longest` tokens."""
    samples = held_out_conversations(HELD_OUT_SEED, count, knows_tools)
    asked = [(sample.kind, sample.prompt) for sample in samples]
    return _greedy(llm, asked, longest)


def read_prompts(file: Path) -> list[Messages]:
    """Conversations from JSON lines, each a list of messages that ends with what is to be answered.

    Raises:
        ValueError: a line is something else; names it.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        messages = json.loads(line)
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages) or not messages:
            raise ValueError(f"line {number} of {file} is no list of messages")
        found.append(messages)
    return found


def prompted_documents(
    llm: LLM, prompts: Sequence[Messages], held_out: int, longest: int
) -> tuple[list[Document], HeldOut]:
    """What a target answers to prompts, and to the last `held_out` of them as held-out texts.

    Raises:
        ValueError: there are not more prompts than that.
    """
    if len(prompts) <= held_out:
        raise ValueError(f"{len(prompts)} prompts are not more than the {held_out} that are held out")
    learned = prompts[: len(prompts) - held_out]
    temperatures = itertools.cycle(TEMPERATURES)
    params = [SamplingParams(temperature=next(temperatures), max_tokens=MAX_TOKENS) for _ in learned]
    outputs = llm.chat(list(learned), params, use_tqdm=False)
    documents = [_document(output, 0) for output in outputs]
    return documents, _greedy(llm, [("prompt", prompt) for prompt in prompts[len(learned) :]], longest)


def _greedy(llm: LLM, asked: Sequence[tuple[str, Messages]], longest: int) -> HeldOut:
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.chat([prompt for _, prompt in asked], greedy, use_tqdm=False)
    pairs = [(kind, _document(output, 1)) for (kind, _), output in zip(asked, outputs, strict=True)]
    # An answer of one token has nothing that is drafted.
    kept = [(kind, each) for kind, each in pairs if len(each.ids) <= longest and any(each.written)]
    return HeldOut(tuple(kind for kind, _ in kept), tuple(each for _, each in kept))


def _document(output: RequestOutput, given: int) -> Document:
    """A prompt and its answer, of which the first `given` tokens do not count."""
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    return Document(prompt + answer, [False] * (len(prompt) + given) + [True] * (len(answer) - given))
