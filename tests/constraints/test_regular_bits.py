"""Bits of regular automata: the sets of their tokens as programs read them."""

import numpy as np
import pytest

from jaxinfer.constraints import automaton as automaton_module
from jaxinfer.constraints.automaton import RegularAutomaton, TokenSet
from jaxinfer.constraints.regular import choice, literal, marker, sequence
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.sampling.bounds import packed_bits

PIECES = [*(bytes([byte]) for byte in range(256)), b"ab", None, None, None]
MARKER, EOS, EOS_TOO = 257, 258, 259
VOCABULARY = Vocabulary(PIECES, markers={"<m>": MARKER}, size=len(PIECES) + 7)
EXPRESSION = choice(literal("abc"), sequence(literal("ab"), marker("<m>")), literal("ab"), literal("xyz"))


def automaton():
    return RegularAutomaton(EXPRESSION, VOCABULARY, [EOS, EOS_TOO])


def states(found):
    """Every state that tokens lead to."""
    known, new = {found.start}, [found.start]
    while new:
        state = new.pop()
        following = {found.advance(state, token) for token in np.flatnonzero(found.allowed(state).mask())}
        new += following - known
        known |= following
    return known


def test_bits_are_those_of_the_allowed_set_in_every_state():
    found = automaton()
    for state in states(found):
        assert (found.bits(state) == packed_bits(found.allowed(state).mask())).all()
        again = TokenSet.from_bits(found.bits(state), VOCABULARY.size)
        assert again.mask().tolist() == found.allowed(state).mask().tolist()
    with pytest.raises(ValueError, match="read-only"):
        found.bits(found.start)[0] = 0


def test_bits_that_had_to_make_room_are_found_again(monkeypatch):
    monkeypatch.setattr(automaton_module, "_MOST_KEPT_BITS", 2)
    found = automaton()
    first = {state: found.bits(state).tolist() for state in states(found)}
    assert len(first) > 4 and len(found._bits) == 2
    assert {state: found.bits(state).tolist() for state in first} == first


def test_a_token_is_forced_where_it_is_the_only_one_and_no_end():
    found = automaton()
    assert found.forced(found.start) is None and not found.ends(found.start)
    state = found.advance(found.start, ord("x"))
    assert found.forced(state) == ord("y") and found.forced(found.advance(state, ord("y"))) == ord("z")
    ab = found.advance(found.start, 256)
    assert found.is_final(ab) and found.forced(ab) is None and not found.ends(ab)


@pytest.mark.parametrize("last", [ord("c"), MARKER])
def test_an_output_ends_where_only_ends_may_come(last):
    found = automaton()
    state = found.advance(found.advance(found.start, 256), last)
    assert found.ends(state) and found.forced(state) is None
    ended = found.advance(state, EOS)
    assert found.ends(ended) and found.forced(ended) is None
    alone = RegularAutomaton(literal("a"), VOCABULARY, [EOS])
    assert alone.forced(alone.advance(alone.start, ord("a"))) is None
