"""Several constraints on one output: what all of them allow."""

import itertools
import random

import numpy as np
import pytest

from jaxinfer.constraints.automaton import ConstraintError, RegularAutomaton
from jaxinfer.constraints.bad_words import BadWordsAutomaton
from jaxinfer.constraints.characters import Characters
from jaxinfer.constraints.joined import JoinedAutomaton
from jaxinfer.constraints.regular import character, literal, repeat, sequence
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.sampling.constraint import AutomatonLimits
from tests.constraints.guided import EOS, EOS_TOO, SIZE, after, compiled, on, random_walk, text_of, tokens_of

LETTERS = [bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"]
END = len(LETTERS)
VOCABULARY = Vocabulary([*LETTERS, None], size=END + 20)
A, B, C = range(3)


def letters(most, but=""):
    allowed = character(Characters.of("".join(set("abcdefghijklmnopqrstuvwxyz") - set(but))))
    return RegularAutomaton(repeat(allowed, 0, most), VOCABULARY, [END])


def word(text):
    return RegularAutomaton(literal(text), VOCABULARY, [END])


@pytest.mark.parametrize("seed", range(5))
def test_a_token_is_allowed_where_every_part_allows_it(seed):
    parts = [letters(6, "x"), letters(None, "aeiou"), BadWordsAutomaton([(1, 2), (3, 3)], VOCABULARY.size)]
    joined, rng = JoinedAutomaton(parts), random.Random(seed)
    state, states = joined.start, [part.start for part in parts]
    for _ in range(8):
        sets = [part.allowed(each).mask() for part, each in zip(parts, states, strict=True)]
        expected = np.flatnonzero(np.logical_and.reduce(sets)).tolist()
        assert on(joined, state) == expected == np.flatnonzero(joined.allowed(state).mask()).tolist()
        assert [token for token in range(-1, 60) if joined.advance(state, token) is not None] == expected
        assert joined.is_final(state) == all(p.is_final(s) for p, s in zip(parts, states, strict=True))
        token = rng.choice(expected)
        state = joined.advance(state, token)
        states = [part.advance(each, token) for part, each in zip(parts, states, strict=True)]
        assert state == tuple(states)


def test_what_is_forced_and_what_ends_follow_from_all_parts():
    joined = JoinedAutomaton([word("abc"), letters(None)])
    state = joined.start
    for token in (A, B, C):
        assert joined.forced(state) == token and not joined.ends(state) and not joined.is_final(state)
        state = joined.advance(state, token)
    assert joined.forced(state) is None and joined.ends(state) and joined.is_final(state)
    free = JoinedAutomaton([letters(3), letters(2)])
    assert free.forced(free.start) is None and not free.ends(free.start) and free.is_final(free.start)


def test_a_token_that_the_parts_leave_between_them_is_forced():
    some = RegularAutomaton(sequence(character(Characters.of("ab")), literal("c")), VOCABULARY, [END])
    joined = JoinedAutomaton([some, BadWordsAutomaton([(A,)], VOCABULARY.size)])
    assert joined.forced(joined.start) == B


def test_parts_that_have_no_token_in_common_are_an_error_and_never_an_empty_set():
    joined = JoinedAutomaton([word("ab"), word("cd")])
    for ask in (joined.bits, joined.allowed, joined.forced):
        with pytest.raises(ConstraintError, match="no token is allowed by all of 2 constraints"):
            ask(joined.start)
    assert joined.advance(joined.start, A) is None and not joined.is_final(joined.start)


def test_bits_of_a_product_cannot_be_changed():
    joined = JoinedAutomaton([letters(3), letters(2)])
    with pytest.raises(ValueError, match="read-only"):
        joined.bits(joined.start)[0] = 0


def test_one_part_is_as_it_is_alone_and_none_are_refused():
    alone = word("ab")
    joined = JoinedAutomaton([alone])
    assert joined.bits(joined.start) is alone.bits(alone.start)
    with pytest.raises(ValueError, match="automata must be at least one, got none"):
        JoinedAutomaton([])


def test_a_product_is_followed_by_the_host():
    joined = JoinedAutomaton([word("ab"), word("ab")])
    assert joined.on_device(AutomatonLimits()) is None
    with pytest.raises(ValueError, match="JoinedAutomaton is followed by the host"):
        joined.index_on_device(joined.start)


def test_a_grammar_beside_banned_words_writes_neither_them_nor_what_it_does_not_allow():
    grammar = compiled(regex="[ab]{40}")
    banned = [tokens_of("a") * 2, tokens_of("ab")]
    joined = JoinedAutomaton([grammar, BadWordsAutomaton(banned, SIZE)])
    for seed in range(5):
        tokens, state = random_walk(joined, seed, most=50)
        pairs = list(itertools.pairwise(tokens))
        assert joined.ends(state) and len(text_of(tokens)) == 40 and set(text_of(tokens)) == set(b"ab")
        assert tuple(banned[0]) not in pairs and (len(banned[1]) > 1 or banned[1][0] not in tokens)
    assert any(tuple(banned[0]) in itertools.pairwise(random_walk(grammar, seed, most=50)[0]) for seed in range(5))


def test_the_states_of_a_product_are_those_of_its_grammars():
    one, other = compiled(regex="[a-f]+"), compiled(regex="[d-k]{2,4}")
    joined = JoinedAutomaton([one, other])
    state = joined.start
    for token in tokens_of("def"):
        state = joined.advance(state, token)
    assert state == (after(one, "def"), after(other, "def")) and joined.is_final(state)
    rest = {text_of([token]) for token in on(joined, state) if token not in (EOS, EOS_TOO)}
    assert rest == {b"d", b"e", b"f"}
