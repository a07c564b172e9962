"""The loop of the functions for scripts: draft a chain, verify it in one forward of the target, add a token."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.speculative.cached_decoder import CachedDecoder
from jaxinfer.textbook.speculative.chain_drafters import ChainDrafter
from jaxinfer.textbook.speculative.classic_rule import verify
from jaxinfer.textbook.speculative.language_model import LanguageModel, Reader
from jaxinfer.textbook.speculative.logits_processors import LogitsProcessor
from jaxinfer.textbook.speculative.random_streams import Streams
from jaxinfer.textbook.speculative.step_view import Round, StepView

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A checked prompt to be continued."""

    prompt: list[int]
    total_len: int  # most tokens of prompt and continuation
    eos: frozenset[int]
    pad: int
    target: LanguageModel

    @classmethod
    def of(
        cls,
        inputs: Sequence[int],
        target: LanguageModel,
        max_gen_len: int,
        eos_tokens_id: int | Sequence[int],
        pad_token_id: int,
    ) -> Task:
        """Check the arguments and make a task of them.

        Raises:
            ValueError: an argument is out of range; the message has its name, its value and what is allowed.
        """
        prompt = [as_token(f"inputs[{index}]", token, target.vocab_size) for index, token in enumerate(inputs)]
        if not 1 <= len(prompt) < target.max_len:
            raise ValueError(
                f"inputs must have from 1 to {target.max_len - 1} tokens, so that one more fits, got {len(prompt)}"
            )
        check_integer("max_gen_len", max_gen_len, 1)
        ends = [eos_tokens_id] if isinstance(eos_tokens_id, int | np.integer) else eos_tokens_id
        eos = frozenset(as_token("eos_tokens_id", token, target.vocab_size) for token in ends)
        pad = as_token("pad_token_id", pad_token_id, target.vocab_size)
        return cls(prompt, min(target.max_len, len(prompt) + max_gen_len), eos, pad, target)

    def reader(self, model: LanguageModel, use_cache: bool) -> Reader:
        """Return a reader of the task's text with this model."""
        return Reader(model, self.total_len, len(self.prompt), use_cache=use_cache)


class Continuation:
    """A task's text while it grows: one array of the final length, padded after its newest token."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._ids = np.full(task.total_len, task.pad, np.int32)
        self._ids[: len(task.prompt)] = task.prompt
        self._count = len(task.prompt)
        self.finished = False

    @property
    def tokens(self) -> list[int]:
        """Token ids of prompt and continuation."""
        return self._ids[: self._count].tolist()

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self._task.prompt) :]

    @property
    def room(self) -> int:
        """Number of tokens that still fit."""
        return self._task.total_len - self._count

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens up to the first end token; returns those that were appended."""
        ends = [index for index, token in enumerate(tokens) if token in self._task.eos]
        landed = list(tokens[: ends[0] + 1] if ends else tokens)
        self._ids[self._count : self._count + len(landed)] = landed
        self._count += len(landed)
        self.finished = bool(ends) or self.room == 0
        return landed


def speculate(
    task: Task,
    reader: Reader,
    drafter: ChainDrafter,
    processor: LogitsProcessor,
    streams: Streams,
    *,
    first_target: bool,
    skip_sample_adjustment: bool,
    view: StepView | None,
) -> tuple[list[int], float]:
    """Continue the task's prompt in rounds of drafts and verification.

    Returns:
        The continuation, and the share of all drafts that was accepted (0 without drafts).
    """
    text = Continuation(task)
    accepted = drafted = 0
    if first_target:
        logits = reader.logits(text.tokens)
        first = text.extend([processor.sample(processor(logits[0]), streams.final)])
        drafter.learn(task.prompt, first, logits)
        if view:
            view.initial_step(first[0])
    while not text.finished:
        before = text.tokens
        proposal = drafter.propose(before, text.room - 1)
        drafts = proposal.tokens
        logits = reader.logits(before + drafts, last=len(drafts) + 1)
        p = processor(logits)
        verdict = verify(p, proposal.q, drafts, streams, skip_sample_adjustment=skip_sample_adjustment)
        landed = text.extend([*drafts[: verdict.num_accepted], verdict.token])
        drafter.learn(before, landed, logits[: len(landed)])
        accepted, drafted = accepted + verdict.num_accepted, drafted + len(drafts)
        logger.debug(
            "round at %d: %d drafts, %d accepted, entropy %s",
            len(before), len(drafts), verdict.num_accepted, proposal.entropy,
        )  # fmt: skip
        if view:
            beliefs = processor.beliefs(logits)
            draws = () if processor.is_greedy else verdict.draws
            view.speculative_step(Round(len(before), proposal, verdict, draws, beliefs, len(landed), text.generated))
    if view and text.generated[-1] in task.eos:
        view.end_token_found(len(text.tokens) - 1)
    return text.generated, accepted / drafted if drafted else 0.0


def as_language_model(name: str, model: LanguageModel | DecoderLM) -> LanguageModel:
    """Return a `LanguageModel`: a converted model is wrapped in a `CachedDecoder`, others must be one already.

    Raises:
        ValueError: the model is neither.
    """
    if isinstance(model, DecoderLM):
        return CachedDecoder(model)
    missing = [part for part in ("vocab_size", "max_len", "init_cache", "forward") if not hasattr(model, part)]
    if missing:
        raise ValueError(f"{name} must be a converted model or a LanguageModel, got {model!r} without {missing[0]}")
    return model


def streams_of(key: jax.Array | Streams | None, processor: LogitsProcessor) -> Streams:
    """Return the streams of a key, or given streams as they are; a greedy processor needs no key.

    Raises:
        ValueError: there is no key, and the processor draws tokens.
    """
    if isinstance(key, Streams):
        return key
    if key is None:
        if not processor.is_greedy:
            raise ValueError(f"key must be a jax.random key where {type(processor).__name__} draws tokens, got None")
        key = jax.random.key(0)
    return Streams.of(key)


def as_token(name: str, token: Any, vocab_size: int) -> int:
    """Return a token id as an int.

    Raises:
        ValueError: it is not in the vocabulary.
    """
    check_integer(name, token, 0)
    if token >= vocab_size:
        raise ValueError(f"{name} must be a token id below {vocab_size}, got {token!r}")
    return int(token)


def check_integer(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_same_vocabulary(names: Collection[str], sizes: Collection[int]) -> None:
    """Raise ValueError if the two vocabularies differ in size."""
    if len(set(sizes)) > 1:
        raise ValueError(f"{' and '.join(names)} must have one vocabulary, got {' and '.join(map(str, sizes))} tokens")
