"""Models that are tables, and every way that a function's random choices can fall."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxinfer.textbook.speculative.random_streams import Streams
from tests.sampling.reference import Filters, probabilities_of

Distribution = dict[tuple[int, ...], float]


class TableModel:
    """A `LanguageModel` whose logits follow from the last two tokens, which it looks up in its cache and nowhere else.

    Args:
        table: [V, V, V], logits by the last token but one, the last token and the next.
        max_len: the most tokens of a sequence.
    """

    def __init__(self, table: np.ndarray, max_len: int = 64) -> None:
        self.table, self.max_len = np.asarray(table, np.float32), max_len
        self.vocab_size = len(table)
        self.read: list[tuple[int, int]] = []  # (start, number of tokens) of every pass

    def init_cache(self, max_len: int, prompt_len: int) -> np.ndarray:
        return np.full(max_len, self.vocab_size - 1)

    def forward(self, cache: np.ndarray, token_ids: np.ndarray, start: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        end = start + len(token_ids)
        assert start >= 0 and 1 <= last <= len(token_ids) and end <= len(cache)
        self.read.append((start, len(token_ids)))
        cache[start:end] = token_ids
        at = np.arange(end - last, end)
        return self.table[np.where(at > 0, cache[at - 1], 0), cache[at]], cache

    def logits_after(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [V], by the text itself."""
        return self.table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]


def table_model(vocab_size: int, seed: int, *, spread: float = 1.5) -> TableModel:
    """A random one: `spread` is the logits' standard deviation."""
    return TableModel(spread * np.random.default_rng(seed).standard_normal((vocab_size,) * 3))


def autoregressive_distribution(
    model: TableModel, prompt: Sequence[int], length: int, filters: Filters, eos: Collection[int] = ()
) -> Distribution:
    """The probability of every continuation, by the definition: the product of those of its tokens."""
    result: Distribution = {(): 1.0}
    for _ in range(length):
        longer: Distribution = {}
        for tokens, chance in result.items():
            if tokens and tokens[-1] in eos:
                longer[tokens] = chance
                continue
            for token, p in enumerate(probabilities_of(model.logits_after([*prompt, *tokens]), filters)):
                if p > 0:
                    longer[(*tokens, token)] = chance * float(p)
        result = longer
    return result


class Script:
    """`RandomChoices` that follow a list of decisions, and then take the first option that is possible."""

    def __init__(self, decisions: Sequence[int]) -> None:
        self.decisions = list(decisions)
        self.chance = 1.0
        self.untaken: list[list[int]] = []  # scripts that go another way at a choice that this one was free to make
        self._made = 0

    @property
    def latest(self) -> None:
        return None

    def token(self, probabilities: np.ndarray) -> int:
        return self._choose(probabilities)

    def accepts(self, probability: float) -> bool:
        return bool(self._choose([1 - probability, probability]))

    def _choose(self, probabilities: Sequence[float] | np.ndarray) -> int:
        if self._made == len(self.decisions):
            first, *others = np.flatnonzero(np.asarray(probabilities) > 0).tolist()
            self.untaken += [[*self.decisions, other] for other in others]
            self.decisions.append(first)
        decision = self.decisions[self._made]
        self._made += 1
        self.chance *= float(probabilities[decision])
        return decision


def outcomes(run: Callable[[Streams], Sequence[int]]) -> Distribution:
    """The exact distribution of what `run` returns: it is run once for every way that its choices can fall."""
    result: defaultdict[tuple[int, ...], float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        script = Script(scripts.pop())
        result[tuple(run(Streams(script, script, script)))] += script.chance
        scripts += script.untaken
    return dict(result)


def distance(found: Distribution, wanted: Distribution) -> float:
    """The greatest difference in probability of any outcome."""
    return max(abs(found.get(key, 0.0) - wanted.get(key, 0.0)) for key in itertools.chain(found, wanted))
