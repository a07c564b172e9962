"""Automata over tokens against searches in plain Python, with planted bugs that the same checks must find."""

import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.constraints import automaton as automaton_module
from jaxinfer.constraints.automaton import RegularAutomaton, TokenSet
from jaxinfer.constraints.characters import Characters
from jaxinfer.constraints.deterministic import LazyAutomaton
from jaxinfer.constraints.regular import character, choice, literal, marker, repeat, sequence, text_without
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.sampling.constraint import DEAD, FREE, AutomatonLimits, Constraint, Words, advance, allowed

ALL_BYTES = np.ones(256, bool)
BYTES = [bytes([byte]) for byte in range(256)]
WORDS = ["a", "b", "ab", "ba", "aab", "abc", "é", "aé", "日", "b日", "<m>", "a<", "m>"]
CUT = [b"a\xc3", b"\xa9b", b"\xe6\x97", b"\xa5"]  # tokens that end or begin inside a character
PIECES = [*BYTES, *map(str.encode, WORDS), *CUT, b"<m>", None, None]
MARKER, SPECIAL, EOS = len(PIECES) - 3, len(PIECES) - 2, len(PIECES) - 1
VOCABULARY = Vocabulary(PIECES, markers={"<m>": MARKER, "<special>": SPECIAL}, size=len(PIECES) + 5)

# A sentence is a tuple of texts and of markers, which stand in a tuple of their own.
WORDS_ON_DEVICE = Words.of(VOCABULARY.pieces)
LIMITS = AutomatonLimits(num_states=128, num_classes=64, num_markers=4)
ALLOWED, ADVANCE = jax.jit(allowed), jax.jit(advance)
ADVANCE_SHORT = jax.jit(functools.partial(advance, most_bytes=2))

parts = st.sampled_from(["a", "b", "c", "é", "日", "abé", ("<m>",)])
languages = st.lists(st.lists(parts, max_size=6).map(tuple), min_size=1, max_size=6)


def expression_of(sentences):
    return choice(
        *(
            sequence(*(marker(part[0]) if isinstance(part, tuple) else literal(part) for part in sentence))
            for sentence in sentences
        )
    )


def symbols_of(sentence):
    """A sentence as bytes, the marker's token and the end."""
    flat = [[MARKER + 1000] if isinstance(part, tuple) else list(part.encode()) for part in sentence]
    return [*(symbol for part in flat for symbol in part), EOS + 1000]


def symbols_of_token(token):
    if token in (MARKER, EOS):
        return [token + 1000]
    return list(VOCABULARY.pieces[token] or ()) or None


def mistakes(automaton, sentences, seed):
    """Where a random walk's allowed tokens, successors and ends differ from those of a search through all sentences."""
    rng = random.Random(seed)
    wanted = [symbols_of(sentence) for sentence in sentences]
    state, written, found = automaton.start, [], []
    while not written or written[-1] != EOS + 1000:
        expected = {
            token
            for token in range(VOCABULARY.size)
            if (own := symbols_of_token(token))
            and any(sentence[: len(written) + len(own)] == written + own for sentence in wanted)
        }
        allowed = automaton.allowed(state)
        if set(np.flatnonzero(allowed.mask())) != expected:
            found.append((written, "allowed"))
        if {token for token in range(VOCABULARY.size) if automaton.advance(state, token) is not None} != expected:
            found.append((written, "advance"))
        if automaton.is_final(state) != (EOS in expected):
            found.append((written, "final"))
        token = rng.choice(sorted(expected))
        state, written = automaton.advance(state, token), written + symbols_of_token(token)
        if state is None:
            return found
    return found


def impurities(automaton, tokens):
    """What of a walk comes out differently when all drafts have been tried from each of its states in between."""
    states, sets = [automaton.start], [automaton.allowed(automaton.start).mask()]
    for token in tokens:
        states.append(automaton.advance(states[-1], token))
        sets.append(automaton.allowed(states[-1]).mask())
    found = []
    for index, token in enumerate(tokens):
        for draft in range(VOCABULARY.size):
            automaton.advance(states[index], draft)
        if automaton.advance(states[index], token) != states[index + 1]:
            found.append((index, "advance"))
        if (automaton.allowed(states[index]).mask() != sets[index]).any():
            found.append((index, "allowed"))
    return found


class FirstByteOnly(RegularAutomaton):
    """Planted bug: a token is allowed if its first byte is."""

    def _find_allowed(self, state):
        mask = super()._find_allowed(state)
        for token, piece in enumerate(VOCABULARY.pieces):
            if piece and token != MARKER and state >= 0:
                mask[token] = self._bytes.step(state, piece[0]) >= 0
        return mask


class MarkersAreText(RegularAutomaton):
    """Planted bug: the token of a marker may also spell its text."""

    def _find_allowed(self, state):
        mask = super()._find_allowed(state)
        return mask | self._vocabulary.trie.walk(state, self._bytes.steps) if state >= 0 else mask


class Mutating(RegularAutomaton):
    """Planted bug: it moves with every token that it is shown, and answers from where it is."""

    at = None

    def advance(self, state, token):
        following = super().advance(state if self.at is None else self.at, token)
        self.at = following if following is not None else self.at
        return following


@given(languages, st.integers(0, 2**32))
@settings(max_examples=60)
def test_allowed_tokens_and_successors_are_those_of_a_search_through_all_sentences(sentences, seed):
    assert mistakes(RegularAutomaton(expression_of(sentences), VOCABULARY, [EOS]), sentences, seed) == []


def test_an_automaton_that_looks_at_first_bytes_only_is_found_out():
    sentences = [("a", "c"), ("é",)]
    assert mistakes(FirstByteOnly(expression_of(sentences), VOCABULARY, [EOS]), sentences, 0) != []


def test_an_automaton_that_takes_a_marker_for_text_is_found_out():
    sentences = [("<m>",), ("b", ("<m>",))]
    assert mistakes(RegularAutomaton(expression_of(sentences), VOCABULARY, [EOS]), sentences, 0) == []
    assert mistakes(MarkersAreText(expression_of(sentences), VOCABULARY, [EOS]), sentences, 0) != []


def test_drafts_that_are_tried_and_forgotten_change_nothing():
    sentences = [("a", "b", ("<m>",), "日"), ("ab", "é")]
    tokens = [ord("a"), ord("b"), MARKER, *"日".encode()]
    assert impurities(RegularAutomaton(expression_of(sentences), VOCABULARY, [EOS]), tokens) == []
    assert impurities(Mutating(expression_of(sentences), VOCABULARY, [EOS]), tokens) != []


def test_what_is_allowed_after_the_end_is_the_end():
    automaton = RegularAutomaton(literal("a"), VOCABULARY, [EOS, SPECIAL])
    final = automaton.advance(automaton.start, ord("a"))
    assert not automaton.is_final(automaton.start) and automaton.is_final(final)
    ended = automaton.advance(final, EOS)
    assert automaton.is_final(ended) and automaton.advance(ended, SPECIAL) == ended
    assert np.flatnonzero(automaton.allowed(ended).mask()).tolist() == [SPECIAL, EOS]


def test_a_marker_that_ends_sequences_too_is_taken_where_the_grammar_has_it():
    automaton = RegularAutomaton(sequence(literal("a"), marker("<m>")), VOCABULARY, [MARKER])
    assert automaton.advance(automaton.start, MARKER) is None
    before = automaton.advance(automaton.start, ord("a"))
    assert np.flatnonzero(automaton.allowed(before).mask()).tolist() == [MARKER]
    assert automaton.is_final(automaton.advance(before, MARKER))


def test_a_marker_without_a_token_is_spelled():
    automaton = RegularAutomaton(marker("aab"), VOCABULARY, [EOS])
    starts = {VOCABULARY.pieces[token] for token in np.flatnonzero(automaton.allowed(automaton.start).mask())}
    assert starts == {b"a", b"aab"}


def test_ids_behind_the_last_token_and_below_the_first_are_never_allowed():
    anything = repeat(character(Characters.but()), 0, None)
    automaton = RegularAutomaton(anything, VOCABULARY, [EOS])
    allowed = automaton.allowed(automaton.start)
    for token in (-1, len(PIECES), VOCABULARY.size - 1, VOCABULARY.size, SPECIAL):
        assert token not in allowed and automaton.advance(automaton.start, token) is None


@pytest.mark.parametrize("eos", [[], [-1], [VOCABULARY.size]])
def test_ends_of_sequences_must_be_tokens(eos):
    with pytest.raises(ValueError, match="eos_token_ids must be tokens below"):
        RegularAutomaton(literal("a"), VOCABULARY, eos)


def test_a_grammar_that_the_vocabulary_cannot_spell_is_refused():
    with pytest.raises(ValueError, match="nothing that the grammar accepts can be spelled"):
        RegularAutomaton(literal("abc"), Vocabulary([b"a", b"b", b"x"]), [2])


def test_a_path_that_cannot_be_spelled_to_its_end_is_not_begun():
    expression = choice(literal("ab"), literal("ax"), literal("cy"))
    automaton = RegularAutomaton(expression, Vocabulary([b"a", b"b", b"c", b"ax", None]), [4])
    assert np.flatnonzero(automaton.allowed(automaton.start).mask()).tolist() == [0]
    after = automaton.advance(automaton.start, 0)
    assert np.flatnonzero(automaton.allowed(after).mask()).tolist() == [1]


def test_a_byte_that_is_no_token_of_its_own_may_come_inside_of_a_token():
    anything = repeat(character(Characters.but()), 0, None)
    automaton = RegularAutomaton(anything, Vocabulary([b"a", b"qu", "é".encode(), b"\xc3", None]), [4])
    assert np.flatnonzero(automaton.allowed(automaton.start).mask()).tolist() == [0, 1, 4]


@given(languages, st.lists(st.sampled_from([*BYTES[97:100], b"ab", "é".encode(), b"\xc3", b"\xa9"]), max_size=8))
@settings(max_examples=60)
def test_a_walk_that_does_what_is_allowed_always_comes_to_an_end(sentences, pieces):
    vocabulary = Vocabulary([*pieces, None])
    eos = len(pieces)
    try:
        automaton = RegularAutomaton(expression_of(sentences), vocabulary, [eos])
    except ValueError:
        return
    state, rng = automaton.start, random.Random(0)
    for _ in range(40):
        if automaton.is_final(state):
            return
        token = rng.choice(np.flatnonzero(automaton.allowed(state).mask()).tolist())
        state = automaton.advance(state, token)
    raise AssertionError("the walk does not end")


def test_allowed_sets_are_found_once_and_cannot_be_changed():
    automaton = RegularAutomaton(literal("ab"), VOCABULARY, [EOS])
    allowed = automaton.allowed(automaton.start)
    assert automaton.allowed(automaton.start) is allowed
    with pytest.raises(ValueError, match="read-only"):
        allowed.ids[0] = 1


def test_allowed_sets_that_had_to_make_room_are_found_again(monkeypatch):
    monkeypatch.setattr(automaton_module, "_MOST_KEPT_IDS", 3)
    automaton = RegularAutomaton(literal("aabab"), VOCABULARY, [EOS])
    states = [automaton.start]
    for letter in b"aabab":
        states.append(automaton.advance(states[-1], letter))
    first = [automaton.allowed(state).ids.tolist() for state in states]
    assert [automaton.allowed(state).ids.tolist() for state in states] == first
    assert automaton.allowed(states[0]).ids.size and len(automaton._allowed) <= 3


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_a_token_set_has_the_fewer_ids(mask):
    tokens = TokenSet.from_mask(np.array(mask))
    assert tokens.mask().tolist() == mask and len(tokens) == sum(mask)
    assert len(tokens.ids) <= len(mask) / 2 and tokens.ids.dtype == np.int32
    assert [token in tokens for token in range(-1, len(mask) + 1)] == [False, *mask, False]


def accepts(expression, text):
    automaton = LazyAutomaton(expression, {}, ALL_BYTES)
    state = automaton.start
    for byte in text.encode():
        state = automaton.step(state, byte)
        if state < 0:
            return False
    return automaton.is_final(state)


LETTERS = [(character(Characters.of("aé")), "[aé]"), (character(Characters.but(Characters.of("b"))), "[^b]")]
LITERALS = [(literal(text), re.escape(text)) for text in ("", "a", "ab", "é日")]


def combined(inner):
    bounds = st.tuples(st.integers(0, 2), st.integers(0, 2) | st.none())

    def repeated(pair, bound):
        (expression, pattern), (least, more) = pair, bound
        most = None if more is None else least + more
        return repeat(expression, least, most), f"(?:{pattern}){{{least},{'' if most is None else most}}}"

    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(repeated, inner, bounds),
        several.map(lambda some: (sequence(*(e for e, _ in some)), "".join(f"(?:{p})" for _, p in some))),
        several.map(lambda some: (choice(*(e for e, _ in some)), "|".join(f"(?:{p})" for _, p in some))),
    )


@given(
    st.recursive(st.sampled_from(LETTERS + LITERALS), combined, max_leaves=6),
    st.lists(st.text(alphabet="abé日c", max_size=7), min_size=5, max_size=20),
)
def test_expressions_accept_what_regular_expressions_do(pair, texts):
    expression, pattern = pair
    for text in texts:
        assert accepts(expression, text) == (re.fullmatch(pattern, text, re.DOTALL) is not None), (pattern, text)


ranges = st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)).map(sorted).map(tuple), max_size=3)
EDGES = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0xFFFFF, 0x10FFFF]


@given(ranges, st.lists(st.integers(0, 0x10FFFF) | st.sampled_from(EDGES), min_size=1, max_size=20))
def test_a_character_is_accepted_in_utf8_if_it_is_not_excluded(excluded, codes):
    characters = Characters.but(Characters(tuple(excluded)))
    bounds = [bound for pair in excluded for bound in pair]
    for code in [*codes, *bounds]:
        if not 0xD800 <= code <= 0xDFFF:
            expected = not any(first <= code <= last for first, last in excluded)
            assert (chr(code) in characters) == expected
            form = chr(code).encode()
            matching = [
                ranges
                for ranges in characters.byte_ranges
                if len(ranges) == len(form)
                and all(first <= byte <= last for (first, last), byte in zip(ranges, form, strict=True))
            ]
            assert len(matching) == expected


NO_CHARACTERS = [b"\x80", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff"]


@pytest.mark.parametrize("wrong", NO_CHARACTERS)
def test_bytes_that_are_no_character_are_not_accepted(wrong):
    automaton = LazyAutomaton(repeat(character(Characters.but()), 0, None), {}, ALL_BYTES)
    state = automaton.start
    for byte in wrong:
        state = automaton.step(state, byte) if state >= 0 else state
    assert state < 0


@given(st.text(alphabet="[END]a日", max_size=14), st.sampled_from(["[END]", "EE", "aEa", "a"]))
def test_a_text_without_a_word_is_any_other_text(text, stop):
    assert accepts(text_without(stop, Characters.but()), text) == (bool(text) and stop not in text)


@given(st.text(alphabet="[EN a", min_size=1, max_size=5))
def test_the_first_character_of_a_text_without_a_word_may_be_restricted(text):
    expression = text_without("[E", Characters.but(Characters.of(" N")))
    assert accepts(expression, text) == (text[0] not in " N" and "[E" not in text)


@given(languages, st.integers(0, 2**32))
@settings(max_examples=25)
def test_on_the_device_states_lead_where_they_lead_on_the_host(sentences, seed):
    rng = random.Random(seed)
    automaton = RegularAutomaton(expression_of(sentences), VOCABULARY, [EOS])
    arrays = automaton.on_device(LIMITS)
    assert arrays is not None
    constraint = jax.tree.map(jnp.asarray, Constraint(WORDS_ON_DEVICE, arrays))
    everything = jnp.arange(VOCABULARY.size)
    state = automaton.start
    while True:
        index = automaton.index_on_device(state)
        mask = automaton.allowed(state).mask()
        np.testing.assert_array_equal(ALLOWED(constraint, jnp.asarray([FREE, index])), [np.ones_like(mask), mask])
        following = [automaton.advance(state, token) for token in range(VOCABULARY.size)]
        wanted = [DEAD if other is None else automaton.index_on_device(other) for other in following]
        np.testing.assert_array_equal(ADVANCE(constraint, jnp.asarray(index), everything), wanted)
        short = [
            DEAD if len(VOCABULARY.pieces[token] or b"") > 2 and token != MARKER else to
            for token, to in enumerate(wanted)
        ]
        np.testing.assert_array_equal(ADVANCE_SHORT(constraint, jnp.asarray(index), everything), short)
        np.testing.assert_array_equal(ADVANCE(constraint, jnp.asarray(FREE), everything), FREE)
        np.testing.assert_array_equal(ADVANCE(constraint, jnp.asarray(DEAD), everything), DEAD)
        if state == automaton.advance(state, EOS):
            return
        state = rng.choice([other for other in following if other is not None])


def test_an_automaton_that_is_larger_than_the_device_allows_is_not_put_there():
    automaton = RegularAutomaton(literal("aabab"), VOCABULARY, [EOS])
    assert automaton.on_device(LIMITS._replace(num_states=8)) is None
    assert automaton.on_device(LIMITS._replace(num_classes=3)) is None
    assert RegularAutomaton(literal("aabab"), VOCABULARY, [EOS]).on_device(LIMITS._replace(num_states=9)) is not None
