"""Choices on the host: distributed as asked, reproducible, and drawn from streams that know nothing of each other."""

import jax
import numpy as np
import pytest

from jaxinfer.textbook.speculative.generate import (
    MultinomialProcessor,
    NGramStorage,
    autoregressive_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from jaxinfer.textbook.speculative.random_streams import RandomStream, Streams
from tests.sampling.checker import WrongDistributionError, check_draws
from tests.sampling.reference import Filters
from tests.textbook.speculative.toys import autoregressive_distribution, table_model

PROMPT, LENGTH, DRAWS = [1, 0, 2, 1, 0], 2, 1200
TARGET, DRAFTER = table_model(3, seed=1), table_model(3, seed=7)
SAMPLED = MultinomialProcessor(0.8)
EXPECTED = autoregressive_distribution(TARGET, PROMPT, LENGTH, Filters(temperature=0.8))
KEYS = jax.random.split(jax.random.key(17), DRAWS)
INDEX = {tokens: index for index, tokens in enumerate(EXPECTED)}


def check(generate, streams_of=Streams.of):
    """Compare what `generate` makes of many streams with the exact distribution."""
    found = [INDEX[tuple(generate(streams_of(key)))] for key in KEYS]
    check_draws(np.asarray(found), np.asarray(list(EXPECTED.values())))


def by_speculation(streams, drafter=DRAFTER):
    return speculative_generate(
        PROMPT, drafter, TARGET, gamma=1, logits_processor=SAMPLED, max_gen_len=LENGTH, eos_tokens_id=[], key=streams,
        first_target=False,
    )[0]  # fmt: skip


def by_ngrams(streams):
    storage = NGramStorage(3, 3)
    return ngram_assisted_speculative_generate(
        PROMPT, storage, TARGET, gamma=1, logits_processor=SAMPLED, max_gen_len=LENGTH, eos_tokens_id=[], key=streams,
        first_target=False,
    )[0]  # fmt: skip


def plainly(streams):
    return autoregressive_generate(PROMPT, TARGET, LENGTH, SAMPLED, eos_tokens_id=[], key=streams)


@pytest.mark.parametrize("generate", [plainly, by_speculation, by_ngrams])
def test_sampled_output_has_the_exact_distribution(generate):
    check(generate)


def streams_of_parts(draft, acceptance, final):
    """Streams in which equal numbers stand for the same random numbers."""

    def streams_of(key):
        words = np.asarray(jax.random.key_data(key)).tolist()
        return Streams(*(RandomStream([*words, part]) for part in (draft, acceptance, final)))

    return streams_of


SHARED = {
    "draft and acceptance": (streams_of_parts(0, 0, 1), 6),  # with the seed of a drafter where the bias is large
    "draft and residual": (streams_of_parts(0, 1, 0), 7),
    "acceptance and residual": (streams_of_parts(0, 1, 1), 9),
}


@pytest.mark.parametrize("name", SHARED)
def test_streams_that_share_their_numbers_bias_the_output(name):
    planted, seed = SHARED[name]
    drafter = table_model(3, seed)
    check(lambda streams: by_speculation(streams, drafter), streams_of_parts(0, 1, 2))
    with pytest.raises(WrongDistributionError):
        check(lambda streams: by_speculation(streams, drafter), planted)


def test_the_three_streams_of_a_key_differ_and_repeat_with_it():
    def numbers(key):
        even = np.full(1000, 1e-3)
        streams = Streams.of(key)
        return [stream.token(even) for stream in (streams.draft, streams.acceptance, streams.final) for _ in range(4)]

    one, again, old, other = (
        numbers(key)
        for key in (jax.random.key(3), jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(4))
    )  # fmt: skip
    assert one == again == old != other
    assert one[:4] != one[4:8] != one[8:] != one[:4]


def test_a_token_of_probability_zero_is_never_drawn_and_a_certain_one_always():
    class Corner:
        def __init__(self, number):
            self.random = lambda: number

    stream = RandomStream([0])
    for number in (0.0, np.nextafter(1, 0)):
        stream._generator = Corner(number)
        assert stream.token(np.array([0.0, 0.0, 1.0, 0.0])) == 2
        assert stream.accepts(1.0) and not stream.accepts(0.0)


def test_probabilities_that_do_not_sum_to_one_are_refused():
    for wrong in ([0.5, 0.4], [np.nan, 1.0], [0.0, 0.0]):
        with pytest.raises(ValueError, match="probabilities must sum to 1"):
            RandomStream([0]).token(np.array(wrong))
