"""Greedy speculation gives the tokens of a plain loop, on random models, for every way of drafting."""

import doctest
import os
from pathlib import Path

import jax
import pytest

from jaxinfer.textbook.speculative import generate
from jaxinfer.textbook.speculative.cached_decoder import CachedDecoder
from jaxinfer.textbook.speculative.generate import (
    MultinomialProcessor,
    NGramStorage,
    OneLevelNGramStorage,
    autoregressive_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from tests.builders import FAMILIES, model_config, random_model, random_prompts
from tests.plain_greedy import PlainGreedy

LENGTH = 14
PROMPTS = random_prompts([5, 12], seed=3)


@pytest.fixture(scope="module")
def models():
    target, drafter = random_model(model_config()), random_model(model_config(num_layers=1), seed=8)
    continuations, margin = PlainGreedy(target, PROMPTS, LENGTH).run()
    assert margin > 1e-3  # no tie that the width of a pass could break
    return CachedDecoder(target), CachedDecoder(drafter), continuations


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("first_target", [True, False])
@pytest.mark.parametrize("gamma", range(6))
def test_drafts_of_a_model_change_no_token(models, gamma, first_target, use_cache):
    target, drafter, wanted = models
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        found, rate = speculative_generate(
            prompt, drafter, target, gamma=gamma, max_gen_len=LENGTH, eos_tokens_id=[], use_cache=use_cache,
            first_target=first_target,
        )  # fmt: skip
        assert found == tokens and 0 <= rate < 1


@pytest.mark.parametrize("stop_if_unknown", [True, False])
@pytest.mark.parametrize("storage", [NGramStorage, OneLevelNGramStorage])
def test_drafts_of_ngrams_change_no_token_whatever_the_storage_knows(models, storage, stop_if_unknown):
    target, _, wanted = models
    known = storage(3, target.vocab_size)
    known.initialize(PROMPTS[0] + wanted[0][:9] + [0] + wanted[0][10:])  # what will come, with one mistake
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        for first_target in (True, False):
            found, rate = ngram_assisted_speculative_generate(
                prompt, known, target, max_gen_len=LENGTH, eos_tokens_id=[], stop_if_unknown=stop_if_unknown,
                first_target=first_target, key=jax.random.key(1),
            )  # fmt: skip
            assert found == tokens and (rate > 0.3 or tokens == wanted[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_of_any_family_is_its_own_perfect_drafter(family):
    model = random_model(model_config(family))
    (wanted,), margin = PlainGreedy(model, PROMPTS[:1], LENGTH).run()
    assert margin > 1e-3
    assert autoregressive_generate(PROMPTS[0], model, LENGTH, eos_tokens_id=[]) == wanted
    assert speculative_generate(PROMPTS[0], model, model, max_gen_len=LENGTH, eos_tokens_id=[]) == (wanted, 1.0)


def test_the_earliest_end_token_ends_the_output(models):
    target, drafter, (wanted, _) = models
    ends = [wanted[9], wanted[6]]
    shortened = wanted[: min(wanted.index(end) for end in ends) + 1]
    for pair in ((target, target), (drafter, target)):
        for pad in (0, ends[0]):
            found, _ = speculative_generate(PROMPTS[0], *pair, max_gen_len=LENGTH, eos_tokens_id=ends, pad_token_id=pad)
            assert found == shortened
    assert autoregressive_generate(PROMPTS[0], target, LENGTH, eos_tokens_id=ends) == shortened


def test_sampled_tokens_follow_from_the_key_with_a_cache_and_without(models):
    target, drafter, _ = models

    def sampled(seed, **arguments):
        return speculative_generate(
            PROMPTS[0], drafter, target, logits_processor=MultinomialProcessor(0.8), max_gen_len=LENGTH,
            eos_tokens_id=[], key=jax.random.key(seed), **arguments,
        )  # fmt: skip

    assert sampled(5) == sampled(5, use_cache=False) != sampled(6)


def test_a_drafter_with_a_shorter_longest_sequence_stops_drafting_there(models):
    target, _, wanted = models
    short = random_model(model_config(num_layers=1, max_position_embeddings=16), seed=8)
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        assert speculative_generate(prompt, short, target, max_gen_len=LENGTH, eos_tokens_id=[])[0] == tokens


def test_generation_ends_where_the_longest_sequence_of_the_model_does():
    model = random_model(model_config(max_position_embeddings=16))
    for first_target in (True, False):
        found, _ = speculative_generate(PROMPTS[1], model, model, eos_tokens_id=[], first_target=first_target)
        assert len(found) == 4


@pytest.mark.slow
def test_the_example_of_the_module_runs(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    assert os.path.isdir("checkpoints/tiny")
    assert doctest.testmod(generate, raise_on_error=True).attempted > 0
