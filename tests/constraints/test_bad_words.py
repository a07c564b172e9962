"""Banned sequences as an automaton, against the rule that a request applies to its output."""

import random

import numpy as np
import pytest

from jaxinfer.constraints.bad_words import BadWordsAutomaton
from jaxinfer.sampling.bounds import packed_bits
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request

SIZE = 40
SEQUENCES = ((3,), (1, 2), (1, 1, 2), (2, 1, 1, 1), (0, 39), (5, 6, 7, 8), (6, 7), (1, 2))


def rule(output, sequences=SEQUENCES):
    """bool [SIZE]: what may follow by the rule of `Request.set_now`."""
    request = Request("r", [1, 1, 2, 6], SamplingParams(), 1000, bad_token_ids=sequences)
    request.token_ids += output
    return request.set_now(SIZE)


def mistakes(automaton, seed, length=200):
    rng, state, output, found = random.Random(seed), automaton.start, [], []
    for _ in range(length):
        allowed = rule(output)
        if (automaton.bits(state) != packed_bits(allowed)).any() or (automaton.allowed(state).mask() != allowed).any():
            found.append(tuple(output[-4:]))
        taken = [token for token in range(-1, SIZE + 2) if automaton.advance(state, token) is not None]
        if taken != np.flatnonzero(allowed).tolist():
            found.append(tuple(output[-4:]))
        token = rng.choice([token for token in (0, 1, 2, 5, 6, 7, 8) if allowed[token]])
        output.append(token)
        state = automaton.advance(state, token)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_may_follow_is_what_the_rule_of_requests_says(seed):
    assert mistakes(BadWordsAutomaton(SEQUENCES, SIZE), seed) == []


def test_an_automaton_without_one_of_the_sequences_is_found_out():
    assert mistakes(BadWordsAutomaton(SEQUENCES[:2], SIZE), seed=0) != []


def test_a_state_is_the_latest_tokens_and_tokens_of_the_prompt_do_not_count():
    automaton = BadWordsAutomaton([(1, 2, 3)], SIZE)
    assert automaton.start == ()
    state = automaton.start
    for token in (7, 8, 1, 2):
        state = automaton.advance(state, token)
    assert state == (1, 2) and automaton.advance(state, 3) is None and automaton.advance(state, 4) == (2, 4)


def test_banned_words_neither_force_nor_end_an_output():
    automaton = BadWordsAutomaton([(1, 2)], SIZE)
    state = automaton.advance(automaton.start, 1)
    assert automaton.is_final(state) and not automaton.ends(state) and automaton.forced(state) is None


def test_bits_cannot_be_changed_and_none_are_on_beyond_the_vocabulary():
    bits = BadWordsAutomaton([(1,)], SIZE).bits(())
    assert bits.tolist() == [2**32 - 1 - 2, 2**8 - 1]
    with pytest.raises(ValueError, match="read-only"):
        bits[0] = 0


@pytest.mark.parametrize("sequences", [[()], [(1, SIZE)], [(-1,)]])
def test_a_sequence_that_is_empty_or_of_no_tokens_is_refused(sequences):
    with pytest.raises(ValueError, match="sequences must be non-empty and of tokens below 40, got "):
        BadWordsAutomaton(sequences, SIZE)
