"""States of grammars: functions of their tokens, shared, freed, and untouched by failures beside them."""

import gc
import random
import weakref

import pytest

from jaxinfer.constraints import guidance as guidance_module
from jaxinfer.constraints import guidance_states
from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.guidance import Guidance
from jaxinfer.constraints.guidance_states import KEPT_DEPTH, KeptStates, Track
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from tests.constraints.guided import (
    EOS,
    EOS_TOO,
    GRAMMARS,
    PIECES,
    SIZE,
    TOKENIZER_JSON,
    after,
    compiled,
    fresh_bits,
    on,
    text_of,
    tokens_of,
)

TOO_AMBIGUOUS = 'start: "a" s\ns: s s s | s s | /[a-z ]/ | /[a-z ][a-z]/ | '


def walk_with_drafts(automaton, seed, most):
    """(tokens, bits) at each state of a walk from which wrong and right drafts were tried and dropped."""
    rng, state, tokens = random.Random(seed), automaton.start, []
    found = [(tuple(tokens), automaton.bits(state))]
    while len(tokens) < most:
        for draft in rng.sample(range(SIZE), 20) + rng.sample(on(automaton, state), 1):
            branch = automaton.advance(state, draft)
            if branch is not None:
                automaton.bits(branch)
        token = rng.choice(on(automaton, state))
        if token in (EOS, EOS_TOO):
            break
        tokens.append(token)
        state = automaton.advance(state, token)
        found.append((tuple(tokens), automaton.bits(state)))
    return found


@pytest.mark.parametrize("given", GRAMMARS, ids=[str(number) for number in range(len(GRAMMARS))])
@pytest.mark.parametrize("kept_depth", [0, 3, KEPT_DEPTH])
def test_a_state_has_the_bits_of_a_fresh_matcher_whatever_was_tried_before(given, kept_depth, monkeypatch):
    monkeypatch.setattr(guidance_module, "KEPT_DEPTH", kept_depth)
    automaton = Guidance(TOKENIZER_JSON, SIZE, [EOS, EOS_TOO]).compile(StructuredOutputsParams(**given))
    for seed in range(2):
        for tokens, bits in walk_with_drafts(automaton, seed, most=40):
            assert (bits == fresh_bits(given, tokens)).all(), text_of(tokens)


def test_states_of_a_tree_that_are_held_have_the_bits_of_fresh_matchers_in_any_order(monkeypatch):
    monkeypatch.setattr(guidance_module, "KEPT_DEPTH", 0)
    automaton = Guidance(TOKENIZER_JSON, SIZE, [EOS, EOS_TOO]).compile(StructuredOutputsParams(**GRAMMARS[0]))
    rng, held = random.Random(0), {(): automaton.start}
    for _ in range(150):
        path = rng.choice(sorted(held))
        tokens = [token for token in on(automaton, held[path]) if token not in (EOS, EOS_TOO)]
        if tokens:
            token = rng.choice(tokens)
            held[*path, token] = automaton.advance(held[path], token)
    assert max(map(len, held)) > 5
    for path, state in rng.sample(sorted(held.items(), key=lambda item: item[0]), len(held)):
        assert (automaton.bits(state) == fresh_bits(GRAMMARS[0], path)).all(), path


def test_a_parser_that_is_not_rolled_back_is_found_out(monkeypatch):
    monkeypatch.setattr(guidance_module, "KEPT_DEPTH", 0)
    monkeypatch.setattr(Track, "branch", lambda self, depth, start: Track(self.parser.deep_copy(), self.tokens[:depth]))
    given = {"regex": "([0-9][a-z]){5}"}
    automaton = Guidance(TOKENIZER_JSON, SIZE, [EOS, EOS_TOO]).compile(StructuredOutputsParams(**given))
    with pytest.raises((AssertionError, ConstraintError)):
        for tokens, bits in walk_with_drafts(automaton, seed=0, most=6):
            assert (bits == fresh_bits(given, tokens)).all()


def test_states_after_the_same_tokens_are_shared_and_differ_from_others():
    automaton = compiled(regex="[a-d]{20}")
    first, second = after(automaton, "abcd"), after(automaton, "abcd")
    assert first is second and first != after(automaton, "dcba") and len({first, second}) == 1


def test_states_of_a_long_output_are_freed_as_it_grows():
    automaton = compiled(regex="[a-z ]+")
    tokens = [token for token, piece in PIECES.items() if piece.isalpha() and piece.islower() and piece.isascii()]
    state, states = automaton.start, []
    for token in random.Random(0).choices(tokens, k=500):
        state = automaton.advance(state, token)
        automaton.bits(state)
        states.append(weakref.ref(state))
    gc.collect()
    alive = [number for number, each in enumerate(states) if each() is not None]
    assert alive == [*range(KEPT_DEPTH), 499]


def test_states_of_dropped_drafts_are_freed_and_kept_ones_are_bounded(monkeypatch):
    kept = KeptStates(4)
    automaton = compiled(regex="[a-z]{40}")
    monkeypatch.setattr(automaton, "_kept", kept)
    drafts = [weakref.ref(automaton.advance(automaton.start, token)) for token in on(automaton, automaton.start)[:50]]
    gc.collect()
    assert [each() is not None for each in drafts] == [False] * 46 + [True] * 4


def test_a_state_forgets_those_after_it_that_are_gone(monkeypatch):
    monkeypatch.setattr(guidance_states, "_MOST_CHILDREN", 10)
    automaton = compiled(regex="[a-z]{41}")
    state = automaton.start
    monkeypatch.setattr(automaton, "_kept", KeptStates(4))
    held = [automaton.advance(state, token) for token in on(automaton, state)[:3]]
    for token in on(automaton, state)[:60]:
        automaton.advance(state, token)
        assert len(state.children) <= 11
    assert [automaton.advance(state, token) for token in on(automaton, state)[:3]] == held


def test_a_grammar_that_costs_too_much_ends_with_the_same_error_again_and_spoils_no_other_state(monkeypatch):
    monkeypatch.setattr(guidance_module, "STEP_MAX_ITEMS", 2_000)
    automaton = Guidance(TOKENIZER_JSON, SIZE, [EOS]).compile(StructuredOutputsParams(grammar=TOO_AMBIGUOUS))
    following, state, message = automaton.start, automaton.start, None
    while message is None:
        state, following = following, automaton.advance(following, on(automaton, following)[0])
        try:
            automaton.bits(following)
        except ConstraintError as error:
            message = str(error)
    assert message.startswith("structured_outputs: parser error: Too many items (limit 2000")
    assert "\n" not in message and "verbose" not in message
    for ask in (automaton.bits, automaton.is_final, automaton.forced, automaton.ends):
        with pytest.raises(ConstraintError) as caught:
            ask(following)
        assert str(caught.value) == message
    with pytest.raises(ConstraintError, match="Too many items"):
        automaton.advance(following, 0)
    assert automaton.advance(state, on(automaton, state)[0]) is following
    assert len(on(automaton, state)) > 10 and automaton.advance(state, on(automaton, state)[1]) is not None


def test_a_parser_that_failed_is_replaced_for_the_states_before_the_failure(monkeypatch):
    monkeypatch.setattr(guidance_module, "KEPT_DEPTH", 0)
    monkeypatch.setattr(guidance_module, "STEP_MAX_ITEMS", 2_000)
    automaton = Guidance(TOKENIZER_JSON, SIZE, [EOS, EOS_TOO]).compile(StructuredOutputsParams(grammar=TOO_AMBIGUOUS))
    states, tokens = [automaton.start], []
    with pytest.raises(ConstraintError, match="Too many items"):
        while True:
            tokens.append(on(automaton, states[-1])[0])
            states.append(automaton.advance(states[-1], tokens[-1]))
    assert len(states) > 3 and states[2].track.parser is None
    token = on(automaton, states[2])[1]
    again = automaton.advance(states[2], token)
    assert (automaton.bits(again) == fresh_bits({"grammar": TOO_AMBIGUOUS}, [*tokens[:2], token])).all()


def test_a_grammar_that_fails_between_masks_is_an_error_at_the_next_one():
    automaton = compiled(grammar='start: "a" start')
    state = automaton.advance(automaton.start, tokens_of("a")[0])
    for _ in range(2):
        with pytest.raises(ConstraintError, match="^structured_outputs: parser error: Too many items"):
            automaton.bits(state)
    assert on(automaton, automaton.start) == tokens_of("a")
