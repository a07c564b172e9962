"""Beam search with a length penalty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.speculative.chain_loop import Task, as_language_model, check_integer
from jaxinfer.textbook.speculative.language_model import LanguageModel
from jaxinfer.textbook.speculative.logits_processors import most_likely_first, softmax
from jaxinfer.textbook.speculative.step_view import StepView


@dataclass(frozen=True)
class Beam:
    """A candidate continuation."""

    tokens: tuple[int, ...]  # generated
    logprob: float  # in nats, of all tokens together
    score: float
    ended: bool  # whether by an end token


def beam_search_generate(
    inputs: Sequence[int],
    model: LanguageModel | DecoderLM,
    max_gen_len: int = 40,
    num_beams: int = 4,
    top_k: int = 3,
    min_length: float = 5.0,
    alpha: float = 1.2,
    eos_tokens_id: int | Sequence[int] = 1,
    pad_token_id: int = 0,
    debug: bool = False,
    tokenizer: Any = None,
) -> list[int]:
    """Return the best continuation that beam search finds, ended by an end token or by its length. Nothing is random.

    A continuation of n tokens scores its log probability divided by ((min_length + n) / (min_length + 1)) ** alpha, the
    penalty of Wu et al. 2016, "Google's neural machine translation system", with 5 and 1 made parameters. In every step
    each beam that has not ended is continued by its most likely tokens, and the best of all continuations and ended
    beams stay; of equal scores, the earlier beam and the lower token id. A search as wide as the vocabulary and the
    number of sequences is exhaustive.

    Args:
        inputs: token ids of the prompt, at least one.
        model: computes the logits. One cache serves all beams: a beam reads again what it does not share with the
            previous one.
        max_gen_len: most tokens to generate; fewer at the end of the model's longest sequence.
        num_beams: continuations that are kept in every step.
        top_k: continuations of each beam; of the prompt, `num_beams`.
        min_length: weakens the length penalty; in tokens, at least 0.
        alpha: 0 compares log probabilities as they are; greater numbers favour long continuations.
        eos_tokens_id: the end token, or several.
        pad_token_id: accepted for symmetry with the other functions; beams need no padding.
        debug: print the beams of each step.
        tokenizer: decodes tokens for the debug view, see `StepView`.

    Returns:
        Generated token ids, the end token included.

    Raises:
        ValueError: an argument is out of range; the message has its name, its value and what is allowed.
    """
    model = as_language_model("model", model)
    task = Task.of(inputs, model, max_gen_len, eos_tokens_id, pad_token_id)
    check_integer("num_beams", num_beams, 1)
    check_integer("top_k", top_k, 1)
    if not 0 <= min_length < math.inf:
        raise ValueError(f"min_length must be a number of at least 0, got {min_length!r}")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be a finite number, got {alpha!r}")
    reader, view = task.reader(model, use_cache=True), StepView(tokenizer) if debug else None

    def extended(beam: Beam, count: int) -> list[Beam]:
        if beam.ended:
            return [beam]
        probabilities = softmax(reader.logits([*task.prompt, *beam.tokens])[0])
        penalty = ((min_length + len(beam.tokens) + 1) / (min_length + 1)) ** alpha
        found = []
        for token in most_likely_first(probabilities)[:count].tolist():
            with np.errstate(divide="ignore"):
                logprob = beam.logprob + float(np.log(probabilities[token]))
            found.append(Beam((*beam.tokens, token), logprob, logprob / penalty, token in task.eos))
        return found

    beams = [Beam((), 0.0, 0.0, ended=False)]
    for length in range(task.total_len - len(task.prompt)):
        candidates = [found for beam in beams for found in extended(beam, top_k if length else num_beams)]
        beams = sorted(candidates, key=lambda beam: beam.score, reverse=True)[:num_beams]
        if view:
            view.beam_search_step(len(task.prompt) + length, [(beam.score, beam.tokens) for beam in beams])
        if all(beam.ended for beam in beams):
            break
    if view and beams[0].ended:
        view.end_token_found(len(task.prompt) + len(beams[0].tokens) - 1)
    return list(beams[0].tokens)
