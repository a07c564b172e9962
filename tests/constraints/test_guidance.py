"""Token automata of grammars: a state is a function of its tokens, and the bit of a mask alone decides."""

import gc
import random
import threading
import weakref

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from jaxinfer.constraints import guidance as guidance_module
from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.guidance import Guidance, GuidanceState
from jaxinfer.constraints.guidance_grammar import grammar_of
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.sampling.bounds import num_words, packed_bits
from jaxinfer.sampling.constraint import AutomatonLimits
from jaxinfer.tokenizer import Tokenizer
from tests.constraints.guided import (
    EOS,
    EOS_TOO,
    NUM_TOKENS,
    PIECES,
    SIZE,
    SPECIAL,
    TINY,
    TOKENIZER_JSON,
    accepts,
    after,
    compiled,
    guidance,
    on,
    random_walk,
    text_of,
    tokens_of,
)

GRAMMARS = [
    {"json": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a"]}},
    {"json": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}},
    {"json_object": True, "disable_any_whitespace": True},
    {"regex": "(ab|[0-9]{2,5}|日本)+!?"},
    {"choice": ["yes", "no", "no way", "日本語"]},
    {"grammar": 'start: "(" start ")" | /[a-z ]+/'},
]
# Two tokens of the vocabulary spell it; only one of the spellings is the tokenizer's own.
FORCED = "abcdef"
TOO_AMBIGUOUS = 'start: "a" s\ns: s s s | s s | /[a-z ]/ | /[a-z ][a-z]/ | '


def fresh_bits(given, tokens):
    """The bits after tokens as a new matcher finds them, which no other token was ever shown to."""
    tokenizer = guidance()._llguidance_tokenizer()
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar_of(StructuredOutputsParams(**given)), log_level=0, limits=limits)
    for token in tokens:
        assert matcher.consume_token(token)
    return np.frombuffer(matcher.compute_bitmask(), np.uint32)[: num_words(SIZE)]


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
@pytest.mark.parametrize("seed", range(3))
def test_a_state_has_the_bits_of_a_fresh_matcher_whatever_was_tried_before(given, seed):
    for tokens, bits in walk_with_drafts(compiled(**given), seed, most=40):
        assert (bits == fresh_bits(given, tokens)).all(), text_of(tokens)


def test_bits_of_an_automaton_that_forgets_a_token_are_found_out(monkeypatch):
    after_ = guidance_module.GuidanceAutomaton._after
    monkeypatch.setattr(
        guidance_module.GuidanceAutomaton,
        "_after",
        lambda self, state, token: (
            GuidanceState(state.matcher.deep_copy(), 99) if state.depth == 2 else after_(self, state, token)
        ),
    )
    given = {"regex": "([0-9][a-z]){5}"}
    found = walk_with_drafts(compiled(**given), seed=0, most=6)
    assert any((bits != fresh_bits(given, tokens)).any() for tokens, bits in found)


@pytest.mark.parametrize("given", GRAMMARS, ids=[str(number) for number in range(len(GRAMMARS))])
def test_advance_takes_the_tokens_whose_bits_are_on_and_no_others(given):
    automaton = compiled(**given)
    for length in (0, 1, 3):
        _, state = random_walk(automaton, seed=length, most=length)
        taken = [token for token in range(-1, SIZE + 40) if automaton.advance(state, token) is not None]
        assert taken == on(automaton, state) == automaton.allowed(state).mask().nonzero()[0].tolist()


def test_bits_have_the_layout_of_packed_bits_and_cannot_be_changed():
    automaton = compiled(regex="[a-z]+")
    bits = automaton.bits(automaton.start)
    assert bits.dtype == np.uint32 and bits.shape == (num_words(SIZE),)
    assert (bits == packed_bits(automaton.allowed(automaton.start).mask())).all()
    with pytest.raises(ValueError, match="read-only"):
        bits[0] = 0
    assert automaton.bits(automaton.start) is bits


def test_forced_text_has_the_spelling_of_the_tokenizer_alone():
    """llguidance itself would take other spellings, and so would plain decoding and drafts part."""
    automaton = compiled(regex=FORCED)
    first = tokens_of(FORCED)[0]
    shorter = next(token for token, piece in PIECES.items() if piece == FORCED[:1].encode())
    matcher = automaton.start.matcher
    assert shorter != first and matcher is not None and matcher.deep_copy().validate_tokens([shorter]) == 1
    assert on(automaton, automaton.start) == [first] and automaton.advance(automaton.start, shorter) is None
    assert automaton.forced(automaton.start) == first
    state, tokens = automaton.start, []
    while (token := automaton.forced(state)) is not None:
        tokens.append(token)
        state = automaton.advance(state, token)
    assert tokens == tokens_of(FORCED) and automaton.ends(state)


def test_a_token_that_is_not_allowed_leaves_no_error():
    automaton = compiled(regex="[ab]{3}")
    allowed = on(automaton, automaton.start)
    for token in (-1, 0, SIZE - 1, SIZE, 2**31, EOS, *SPECIAL):
        assert automaton.advance(automaton.start, token) is None
    assert on(automaton, automaton.start) == allowed and accepts(automaton, "aba")


def test_the_end_is_allowed_where_the_grammar_accepts_with_every_token_that_ends():
    automaton = compiled(regex="ab?")
    assert not automaton.is_final(automaton.start) and automaton.advance(automaton.start, EOS) is None
    accepting, stopped = after(automaton, "a"), after(automaton, "ab")
    assert automaton.is_final(accepting) and not automaton.ends(accepting)
    assert automaton.is_final(stopped) and automaton.ends(stopped)
    assert {EOS, EOS_TOO} < set(on(automaton, accepting)) and on(automaton, stopped) == sorted([EOS, EOS_TOO])
    assert automaton.forced(accepting) is None and automaton.forced(stopped) is None


@pytest.mark.parametrize("text", ["a", "ab"])
def test_after_an_end_nothing_but_ends_may_come_and_the_state_before_is_as_it_was(text):
    automaton = compiled(regex="ab?")
    state = after(automaton, text)
    before = on(automaton, state)
    ended = automaton.advance(state, EOS)
    for token in (EOS_TOO, EOS, EOS):
        assert on(automaton, ended) == sorted([EOS, EOS_TOO]) and automaton.is_final(ended) and automaton.ends(ended)
        assert automaton.forced(ended) is None and automaton.advance(ended, tokens_of("b")[0]) is None
        ended = automaton.advance(ended, token)
    assert on(automaton, state) == before


def test_one_token_that_ends_is_not_a_forced_token():
    automaton = Guidance(TOKENIZER_JSON, SIZE, [EOS]).compile(StructuredOutputsParams(regex="a"))
    state = after(automaton, "a")
    assert on(automaton, state) == [EOS] and automaton.forced(state) is None and automaton.ends(state)


def test_a_token_of_text_that_ends_outputs_is_allowed_where_the_grammar_accepts_only():
    """Ends are where the grammar accepts, even with a token that could be text, and that token is never text."""
    (letter,) = tokens_of("b")
    automaton = Guidance(TOKENIZER_JSON, SIZE, [letter]).compile(StructuredOutputsParams(regex="a[bc]+"))
    state = after(automaton, "a")
    assert not automaton.is_final(state) and letter not in on(automaton, state)
    state = after(automaton, "ac")
    assert (
        automaton.is_final(state)
        and letter in on(automaton, state)
        and automaton.ends(automaton.advance(state, letter))
    )


def test_special_tokens_and_padding_are_never_allowed():
    automaton = compiled(json={})
    for seed in range(5):
        tokens, state = random_walk(automaton, seed, most=30)
        allowed = set(on(automaton, state))
        assert set(tokens) <= PIECES.keys() and allowed <= PIECES.keys() | {EOS, EOS_TOO}
        assert not allowed & set(range(NUM_TOKENS, SIZE))


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
    assert alive == [*range(guidance_module._KEPT_DEPTH), 499]


def test_states_of_dropped_drafts_are_freed_and_kept_ones_are_bounded(monkeypatch):
    kept = guidance_module._KeptStates(4)
    automaton = compiled(regex="[a-z]{40}")
    monkeypatch.setattr(automaton, "_kept", kept)
    drafts = [weakref.ref(automaton.advance(automaton.start, token)) for token in on(automaton, automaton.start)[:50]]
    gc.collect()
    assert [each() is not None for each in drafts] == [False] * 46 + [True] * 4


def test_a_state_forgets_those_after_it_that_are_gone(monkeypatch):
    monkeypatch.setattr(guidance_module, "_MOST_CHILDREN", 10)
    automaton = compiled(regex="[a-z]{41}")
    state = automaton.start
    monkeypatch.setattr(automaton, "_kept", guidance_module._KeptStates(4))
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
    for ask in (automaton.bits, automaton.allowed, automaton.is_final, automaton.forced, automaton.ends):
        with pytest.raises(ConstraintError) as caught:
            ask(following)
        assert str(caught.value) == message
    with pytest.raises(ConstraintError, match="Too many items"):
        automaton.advance(following, 0)
    assert automaton.advance(state, on(automaton, state)[0]) is following
    assert len(on(automaton, state)) > 10 and automaton.advance(state, on(automaton, state)[1]) is not None


def test_a_grammar_that_fails_between_masks_is_an_error_at_the_next_one():
    automaton = compiled(grammar='start: "a" start')
    state = automaton.advance(automaton.start, tokens_of("a")[0])
    for _ in range(2):
        with pytest.raises(ConstraintError, match="^structured_outputs: parser error: Too many items"):
            automaton.bits(state)
    assert on(automaton, automaton.start) == tokens_of("a")


def test_an_output_that_no_token_can_continue_is_an_error_and_no_end():
    automaton = compiled(grammar='start: "a" <|end|> "b"')  # a token that ends outputs cannot be text
    state = automaton.advance(automaton.start, tokens_of("a")[0])
    with pytest.raises(ConstraintError, match="^structured_outputs: no token is allowed here"):
        automaton.bits(state)


def test_a_grammar_is_followed_by_the_host():
    automaton = compiled(regex="a")
    assert automaton.on_device(AutomatonLimits()) is None
    with pytest.raises(ValueError, match="GuidanceAutomaton is followed by the host"):
        automaton.index_on_device(automaton.start)


def test_a_grammar_is_compiled_once_for_equal_parameters_and_refusals_are_remembered(monkeypatch):
    calls = counted(monkeypatch)
    own = Guidance(TOKENIZER_JSON, SIZE, [EOS])
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    first = own.compile(StructuredOutputsParams(json=schema))
    assert own.compile(StructuredOutputsParams(json=str(schema).replace("'", '"'))) is first
    assert own.compile(StructuredOutputsParams(json=schema, whitespace_pattern=" ")) is not first
    for _ in range(2):
        with pytest.raises(ValueError, match="Unimplemented keys"):
            own.compile(StructuredOutputsParams(json={"not": {}}))
    assert len(calls) == 3


def test_the_latest_grammars_stay_compiled(monkeypatch):
    monkeypatch.setattr(guidance_module, "MOST_GRAMMARS", 2)
    calls = counted(monkeypatch)
    own = Guidance(TOKENIZER_JSON, SIZE, [EOS])
    a, b, c = (StructuredOutputsParams(regex=letter) for letter in "abc")
    for params in (a, b, a, c, a, b):
        own.compile(params)
    assert [params.text for params in calls] == ["a", "b", "c", "b"] and len(own._compiled) == 2


def test_threads_that_ask_for_one_grammar_compile_it_once_and_find_the_same_states(monkeypatch):
    calls = counted(monkeypatch)
    own = Guidance(TOKENIZER_JSON, SIZE, [EOS, EOS_TOO])
    barrier, walks = threading.Barrier(8), {}

    def follow(number):
        barrier.wait()
        automaton = own.compile(StructuredOutputsParams(**GRAMMARS[0]))
        walks[number] = [automaton, *(random_walk(automaton, seed, most=60)[0] for seed in range(4))]

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [random_walk(compiled(**GRAMMARS[0]), seed, most=60)[0] for seed in range(4)]
    assert len(calls) == 1 and len({id(automaton) for automaton, *_ in walks.values()}) == 1
    assert [found for _, *found in walks.values()] == [expected] * 8


def counted(monkeypatch):
    """The parameters whose grammars are compiled from now on."""
    calls = []

    def compiling(params):
        calls.append(params)
        return grammar_of(params)

    monkeypatch.setattr(guidance_module, "grammar_of", compiling)
    return calls


def test_an_engine_reads_its_vocabulary_when_a_grammar_is_first_compiled():
    texts = []
    own = Guidance(lambda: texts.append(1) or TOKENIZER_JSON, SIZE, [EOS])
    assert texts == []
    for regex in ("a", "b", "(", "a"):
        try:
            own.compile(StructuredOutputsParams(regex=regex))
        except ValueError as error:
            assert regex == "(", error
    assert texts == [1]


def test_a_tokenizer_of_a_checkpoint_gives_the_same_automata():
    own = Guidance.of(Tokenizer(TINY), SIZE, [EOS, EOS_TOO])
    automaton = own.compile(StructuredOutputsParams(**GRAMMARS[0]))
    for seed in range(3):
        tokens, state = random_walk(automaton, seed, most=20)
        assert tokens == random_walk(compiled(**GRAMMARS[0]), seed, most=20)[0]
        assert (automaton.bits(state) == fresh_bits(GRAMMARS[0], tokens)).all()


def test_logits_narrower_than_the_tokenizer_and_damaged_tokenizers_are_refused():
    for text, size in ((TOKENIZER_JSON, EOS + 1), ('{"model": 3}', 100)):
        own = Guidance(text, size, [5])
        with pytest.raises(ValueError, match=f"no grammar can be followed with this tokenizer and vocab_size={size}: "):
            own.compile(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize("eos", [[], [-1], [SIZE]])
def test_ends_of_sequences_must_be_tokens(eos):
    with pytest.raises(ValueError, match="eos_token_ids must be tokens below"):
        Guidance(TOKENIZER_JSON, SIZE, eos)
