"""Drafters of chains: a smaller model, or the n-grams of the text so far."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxinfer.speculative.egag import EntropyGamma, EntropyReading, entropy_of
from jaxinfer.textbook.speculative.language_model import Reader
from jaxinfer.textbook.speculative.logits_processors import LogitsProcessor, most_likely_first, softmax
from jaxinfer.textbook.speculative.ngram_storage import INgramStorage
from jaxinfer.textbook.speculative.random_streams import RandomChoices


@dataclass(frozen=True)
class Proposal:
    """The drafts of a round and the distributions that they were drawn from."""

    tokens: list[int]  # g drafts
    q: np.ndarray  # float64 [g, V]
    beliefs: list[float]  # g probabilities of the drafts, as a debug view shows them, see `LogitsProcessor.beliefs`
    entropy: EntropyReading | None = None  # that determined the number of drafts, where it adapts


class ChainDrafter(Protocol):
    """Proposer of tokens, which may learn from the outcome."""

    def propose(self, tokens: Sequence[int], room: int) -> Proposal:
        """Draft up to `room` tokens (which may be 0) after these tokens. Nothing is drafted after an end token."""
        ...

    def learn(self, tokens: Sequence[int], landed: Sequence[int], logits: np.ndarray) -> None:
        """Learn that `landed` came after `tokens`; `logits` [len(landed), V] are the target's at the place of each."""
        ...


class ModelDrafter:
    """Drafter that draws tokens from a model one after the other.

    Args:
        reader: of the drafting model.
        gamma: most drafts of a round.
        processor: also the target's.
        choices: the random stream for drafts.
        eos: end tokens.
        egag: chooses each round's number of drafts from the entropy of the drafter's own distribution of the first
            draft (before the processor, as a greedy one has no entropy). The number depends on the text alone, not on
            the draws.
    """

    def __init__(
        self,
        reader: Reader,
        gamma: int,
        processor: LogitsProcessor,
        choices: RandomChoices,
        eos: Collection[int],
        egag: EntropyGamma | None = None,
    ) -> None:
        self._reader, self._gamma, self._processor = reader, gamma, processor
        self._choices, self._eos, self._egag = choices, eos, egag

    def propose(self, tokens: Sequence[int], room: int) -> Proposal:
        ids, drafts, q, beliefs, reading = list(tokens), [], [], [], None
        # The last draft is the one after the last token that the drafter has room for.
        limit = min(
            room, self._gamma if self._egag is None else self._egag.gamma_max, self._reader.max_len + 1 - len(ids)
        )
        while len(drafts) < limit and not (drafts and drafts[-1] in self._eos):
            logits = self._reader.logits(ids)[0]
            if self._egag is not None and reading is None:
                reading = self._egag.observe(entropy_of(softmax(logits)))
                limit = min(limit, reading.gamma)
            q.append(self._processor(logits))
            drafts.append(self._processor.sample(q[-1], self._choices))
            beliefs.append(float(self._processor.beliefs(logits)[drafts[-1]]))
            ids.append(drafts[-1])
        return Proposal(drafts, np.reshape(q, (len(drafts), self._reader.vocab_size)), beliefs, reading)

    def learn(self, tokens: Sequence[int], landed: Sequence[int], logits: np.ndarray) -> None:
        pass


class NGramDrafter:
    """Drafter that looks tokens up one after the other, each with a one-point q.

    Args:
        storage: the n-grams; it learns while it is used.
        gamma: most drafts of a round.
        filler_top_k: from 2 on, the storage also learns this many of the target's most likely tokens at every place.
        stop_if_unknown: draft nothing after a context that the storage does not know; otherwise a random token.
        choices: draws the random tokens.
        eos: end tokens.
    """

    def __init__(
        self,
        storage: INgramStorage,
        gamma: int,
        filler_top_k: int,
        stop_if_unknown: bool,
        choices: RandomChoices,
        eos: Collection[int],
    ) -> None:
        self._storage, self._gamma, self._filler_top_k = storage, gamma, filler_top_k
        self._stop_if_unknown, self._choices, self._eos = stop_if_unknown, choices, eos

    def propose(self, tokens: Sequence[int], room: int) -> Proposal:
        ids, drafts, vocab_size = list(tokens), [], self._storage.vocab_size
        while len(drafts) < min(room, self._gamma) and not (drafts and drafts[-1] in self._eos):
            token = self._storage.next_token(ids)
            if token is None:
                if self._stop_if_unknown:
                    break
                token = self._choices.token(np.full(vocab_size, 1 / vocab_size))
            drafts.append(token)
            ids.append(token)
        q = np.zeros((len(drafts), vocab_size))
        q[np.arange(len(drafts)), drafts] = 1.0
        return Proposal(drafts, q, [1.0] * len(drafts))

    def learn(self, tokens: Sequence[int], landed: Sequence[int], logits: np.ndarray) -> None:
        ids = list(tokens)
        for token, row in zip(landed, logits, strict=True):
            self._storage.update(ids, [token])
            if self._filler_top_k > 1:
                self._storage.update(ids, most_likely_first(row)[: self._filler_top_k])
            ids.append(token)
