"""Beam search: the best of all continuations where it is wide enough, and the published score."""

import itertools

import numpy as np
import pytest

from jaxinfer.textbook.speculative.generate import autoregressive_generate, beam_search_generate
from jaxinfer.textbook.speculative.language_model import Reader
from tests.builders import model_config, random_model, random_prompts
from tests.sampling.reference import log_softmax
from tests.textbook.speculative.toys import table_model

PROMPT, VOCAB = [1, 2], 4
WIDE = {"num_beams": VOCAB**4, "top_k": VOCAB}


def exhaustive(model, length, eos, min_length, alpha):
    """The best of all continuations by definition, and how far the second best is."""
    scores = {}
    for tokens in itertools.product(range(VOCAB), repeat=length):
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), length)
        logprob = sum(log_softmax(model.logits_after([*PROMPT, *tokens[:i]]))[tokens[i]] for i in range(end))
        scores[tokens[:end]] = logprob / ((min_length + end) / (min_length + 1)) ** alpha
    first, second = sorted(scores, key=scores.__getitem__, reverse=True)[:2]
    assert scores[first] - scores[second] > 1e-6
    return list(first)


@pytest.mark.parametrize("eos", [(), (0,), (0, 3)])
@pytest.mark.parametrize(("min_length", "alpha"), [(5.0, 1.2), (0.0, 0.0), (1.0, 3.0)])
@pytest.mark.parametrize("seed", range(3))
def test_wide_beams_find_the_best_of_all_continuations(seed, min_length, alpha, eos):
    model = table_model(VOCAB, seed)
    found = beam_search_generate(PROMPT, model, 4, **WIDE, min_length=min_length, alpha=alpha, eos_tokens_id=eos)
    assert found == exhaustive(model, 4, eos, min_length, alpha)


def test_a_cache_that_mixes_beams_is_found_out(monkeypatch):
    monkeypatch.setattr(Reader, "_num_held", lambda self, tokens: len(self._held))
    models = [table_model(VOCAB, seed) for seed in range(3)]
    found = [beam_search_generate(PROMPT, model, 4, **WIDE, eos_tokens_id=0) for model in models]
    assert found != [exhaustive(model, 4, (0,), 5.0, 1.2) for model in models]


def test_one_beam_is_greedy_decoding():
    model = table_model(VOCAB, 5)
    for eos in ((), (1,)):
        greedy = autoregressive_generate(PROMPT, model, 8, eos_tokens_id=eos)
        assert beam_search_generate(PROMPT, model, 8, num_beams=1, top_k=1, eos_tokens_id=eos) == greedy


def test_a_converted_model_is_searched_with_the_defaults_twice_alike():
    model = random_model(model_config())
    (prompt,) = random_prompts([6])
    found = beam_search_generate(prompt, model, 6, eos_tokens_id=[])
    assert found == beam_search_generate(prompt, model, 6, eos_tokens_id=[]) and len(found) == 6


def test_more_beams_and_tokens_than_there_are_do_no_harm():
    assert len(beam_search_generate(PROMPT, table_model(VOCAB, 0), 1, num_beams=99, top_k=99)) == 1


def test_equal_scores_go_to_the_lower_token():
    model = table_model(VOCAB, 0)
    model.table[:] = np.float32(0.0)
    assert beam_search_generate(PROMPT, model, 3, eos_tokens_id=[]) == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 0}, "num_beams must be .* got 0"),
        ({"top_k": 1.5}, "top_k must be .* got 1.5"),
        ({"min_length": -1.0}, "min_length must be .* got -1.0"),
        ({"alpha": float("inf")}, "alpha must be .* got inf"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        beam_search_generate(PROMPT, table_model(VOCAB, 0), **arguments)
