"""Arguments that cannot be right are refused by name and value, before anything is computed."""

import jax
import pytest

from jaxinfer.textbook.speculative.generate import (
    MultinomialProcessor,
    NGramStorage,
    autoregressive_generate,
    beam_search_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from tests.textbook.speculative.toys import TableModel, table_model

MODEL, OTHER = table_model(4, 1), table_model(5, 1)
FUNCTIONS = {
    "plain": lambda inputs, model, **arguments: autoregressive_generate(inputs, model, **arguments),
    "speculative": lambda inputs, model, **arguments: speculative_generate(inputs, MODEL, model, **arguments),
    "n-grams": lambda inputs, model, **arguments: ngram_assisted_speculative_generate(
        inputs, NGramStorage(3, 4), model, **arguments
    ),
    "beams": lambda inputs, model, **arguments: beam_search_generate(inputs, model, **arguments),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("inputs", "arguments", "message"),
    [
        ([], {}, "inputs must have from 1 to 63 tokens, so that one more fits, got 0"),
        ([1] * 64, {}, "inputs must have from 1 to 63 tokens, so that one more fits, got 64"),
        ([1, 4], {}, r"inputs\[1\] must be a token id below 4, got 4"),
        ([1, -1], {}, r"inputs\[1\] must be an integer of at least 0, got -1"),
        ([1, 1.0], {}, r"inputs\[1\] must be an integer of at least 0, got 1.0"),
        ([1], {"max_gen_len": 0}, "max_gen_len must be an integer of at least 1, got 0"),
        ([1], {"eos_tokens_id": [1, 7]}, "eos_tokens_id must be a token id below 4, got 7"),
        ([1], {"pad_token_id": -2}, "pad_token_id must be an integer of at least 0, got -2"),
    ],
)
def test_what_all_functions_refuse(name, inputs, arguments, message):
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[name](inputs, MODEL, **arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_something_that_is_no_model(name):
    with pytest.raises(ValueError, match="must be a converted model or a LanguageModel, got 'gpt' without vocab_size"):
        FUNCTIONS[name]([1], "gpt")


@pytest.mark.parametrize("name", ["speculative", "n-grams"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": -1}, "gamma must be an integer of at least 0, got -1"),
        ({"gamma": 2.0}, "gamma must be an integer of at least 0, got 2.0"),
        ({"logits_processor": MultinomialProcessor(1.0)}, "key must be .* where MultinomialProcessor .* got None"),
        ({"key": 7}, "key must be one jax.random key, got 7"),
        ({"key": jax.random.split(jax.random.key(0))}, "key must be one jax.random key"),
    ],
)
def test_what_speculation_refuses(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[name]([1], MODEL, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma_min": 0}, "gamma_min must be an integer of at least 1, got 0"),
        ({"gamma_min": 6}, r"gamma_min must be from 1 to gamma_max \(5\), got 6"),
        ({"gamma_max": 0}, "gamma_max must be an integer of at least 1, got 0"),
        ({"egag_ema_beta": 1.0}, r"egag_ema_beta must be in \[0, 1\), got 1.0"),
    ],
)
def test_what_lengths_by_entropy_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        speculative_generate([1], MODEL, MODEL, use_egag=True, **arguments)


def test_vocabularies_that_differ():
    with pytest.raises(ValueError, match="drafter and target must have one vocabulary, got 5 and 4 tokens"):
        speculative_generate([1], OTHER, MODEL)
    with pytest.raises(ValueError, match="ngramstorage and target must have one vocabulary, got 3 and 4 tokens"):
        ngram_assisted_speculative_generate([1], NGramStorage(2, 3), MODEL)


def test_a_filler_of_nothing():
    with pytest.raises(ValueError, match="filler_top_k must be an integer of at least 1, got 0"):
        ngram_assisted_speculative_generate([1], NGramStorage(2, 4), MODEL, filler_top_k=0)


def test_room_for_one_token_is_enough_with_a_first_target_and_without():
    for first_target in (True, False):
        found, rate = speculative_generate([1, 2], MODEL, TableModel(MODEL.table, 3), first_target=first_target)
        assert len(found) == 1 and rate == 0.0
