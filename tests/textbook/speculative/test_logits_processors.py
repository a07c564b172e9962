"""Which distributions the processors make of logits: temperature first, then the filters; logits stay as they are."""

from dataclasses import dataclass

import numpy as np
import pytest

from jaxinfer.textbook.speculative.generate import (
    GreedyProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from jaxinfer.textbook.speculative.logits_processors import LogitsProcessor, softmax
from tests.sampling.cases import LOGITS
from tests.sampling.reference import Filters, probabilities_of

VOCAB = 50
CASES = [
    (MultinomialProcessor(0.7), Filters(0.7)),
    (TopKProcessor(1.4, 7), Filters(1.4, top_k=7)),
    (TopKProcessor(0.5, 99), Filters(0.5)),
    (NucleusProcessor(1.7, 0.83), Filters(1.7, top_p=0.83)),
    (NucleusProcessor(0.3, 1.0), Filters(0.3)),
    (TopKNucleusProcessor(1.7, 9, 0.77), Filters(1.7, top_k=9, top_p=0.77)),
]
KINDS = [kind(VOCAB) for kind in LOGITS.values()]


def agrees(processor: LogitsProcessor, filters: Filters) -> bool:
    return all(np.allclose(processor(logits), probabilities_of(logits, filters), atol=1e-12) for logits in KINDS)


@pytest.mark.parametrize(("processor", "filters"), CASES, ids=lambda case: type(case).__name__)
def test_a_processor_makes_the_distribution_that_sampling_has_by_definition(processor, filters):
    assert agrees(processor, filters)


@dataclass(frozen=True)
class TemperatureAfterTopP(NucleusProcessor):
    def __call__(self, logits):
        kept = NucleusProcessor(1.0, self.top_p)(logits) > 0
        return softmax(np.where(kept, np.asarray(logits, np.float64) / self.temperature, -np.inf))


@dataclass(frozen=True)
class WithoutTheCrossingToken(NucleusProcessor):
    returns_probabilities = True

    def _process(self, logits):
        probabilities = softmax(logits)
        order = np.argsort(-probabilities, kind="stable")
        out = np.cumsum(probabilities[order]) > self.top_p
        out[0] = False
        probabilities[order[out]] = 0
        return probabilities / probabilities.sum()


@dataclass(frozen=True)
class WithAllTies(TopKProcessor):
    returns_probabilities = True

    def _process(self, logits):
        return softmax(np.where(logits < np.sort(logits)[-self.top_k], -np.inf, logits))


@pytest.mark.parametrize(
    ("planted", "filters"),
    [
        (TemperatureAfterTopP(1.7, 0.83), Filters(1.7, top_p=0.83)),
        (WithoutTheCrossingToken(1.7, 0.83), Filters(1.7, top_p=0.83)),
        (WithAllTies(1.4, 7), Filters(1.4, top_k=7)),
    ],
)
def test_a_planted_processor_is_found_out(planted, filters):
    assert not agrees(planted, filters)


class AsTheSourceHasIt(MultinomialProcessor):
    """Top-k by masking logits in place; the temperature applies after it."""

    def __init__(self, temperature, top_k):
        super().__init__(temperature)
        object.__setattr__(self, "top_k", top_k)

    def _process(self, logits):
        logits[logits < np.sort(logits, axis=-1)[..., -self.top_k, None]] = -1e20
        return logits


def test_a_processor_that_returns_logits_gets_the_temperature_last():
    rows = np.array([[3.0, 1.0, 2.0, -1.0], [0.5, 0.25, -2.0, 4.0]])
    before = rows.copy()
    found = AsTheSourceHasIt(0.5, 2)(rows)
    np.testing.assert_array_equal(rows, before)
    np.testing.assert_allclose(found[0], [1 / (1 + np.exp(-2)), 0, 1 / (1 + np.exp(2)), 0], atol=1e-12)
    np.testing.assert_allclose(found, TopKProcessor(0.5, 2)(rows), atol=1e-12)


@dataclass(frozen=True)
class DoesNotSaySo(MultinomialProcessor):
    def _process(self, logits):
        return softmax(logits)


def test_probabilities_that_are_not_said_to_be_such_are_refused():
    with pytest.raises(ValueError, match="DoesNotSaySo._process returns probabilities: set returns_probabilities"):
        DoesNotSaySo(1.0)(KINDS[0])


def test_what_a_class_returns_is_not_inherited_by_another_process():
    assert MultinomialProcessor.returns_probabilities and not AsTheSourceHasIt.returns_probabilities

    class Renamed(TopKProcessor):
        pass

    assert Renamed.returns_probabilities


def test_the_token_that_crosses_top_p_is_kept():
    np.testing.assert_allclose(NucleusProcessor(1.0, 0.6)(np.log([0.5, 0.3, 0.2])), [0.625, 0.375, 0.0])


def test_greedy_puts_everything_on_the_first_of_the_greatest():
    rows = np.array([[0.0, 2.0, 2.0], [3.0, -1.0, 0.0], [0.0, 1e-30, 0.0]], np.float32)
    np.testing.assert_array_equal(GreedyProcessor(temperature=5.0)(rows), [[0, 1, 0], [1, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize("processor", [GreedyProcessor(), *(processor for processor, _ in CASES)])
def test_logits_stay_as_they_are_and_rows_do_not_see_each_other(processor):
    logits = np.stack(KINDS)
    before = logits.copy()
    together = processor(logits)
    np.testing.assert_array_equal(logits, before)
    np.testing.assert_array_equal(together, np.stack([processor(row) for row in logits]))
    np.testing.assert_allclose(together.sum(axis=-1), 1.0)


def test_a_tiny_temperature_gives_no_nan():
    assert MultinomialProcessor(1e-30)(np.array([1.0, 80.0, -3.0])).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultinomialProcessor(0.0), "temperature must be .* got 0.0"),
        (lambda: GreedyProcessor(float("nan")), "temperature must be .* got nan"),
        (lambda: TopKProcessor(1.0, 0), "top_k must be .* got 0"),
        (lambda: TopKProcessor(1.0, 2.5), "top_k must be .* got 2.5"),
        (lambda: NucleusProcessor(1.0, 0.0), "top_p must be .* got 0.0"),
        (lambda: TopKNucleusProcessor(1.0, 3, 1.5), "top_p must be .* got 1.5"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
