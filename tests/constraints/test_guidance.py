"""Token automata of grammars: a state is a function of its tokens, and the bit of a mask alone decides."""

import threading

import numpy as np
import pytest

from jaxinfer.constraints import guidance as guidance_module
from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.guidance import Guidance
from jaxinfer.constraints.guidance_grammar import grammar_of
from jaxinfer.constraints.guidance_states import KEPT_DEPTH
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.sampling.bounds import num_words, packed_bits
from jaxinfer.tokenizer import Tokenizer
from tests.constraints.guided import (
    EOS,
    EOS_TOO,
    GRAMMARS,
    NUM_TOKENS,
    PIECES,
    SIZE,
    SPECIAL,
    TINY,
    TOKENIZER_JSON,
    accepts,
    after,
    compiled,
    fresh_bits,
    on,
    random_walk,
    tokens_of,
)

# Two tokens of the vocabulary spell it; only one of the spellings is the tokenizer's own.
FORCED = "abcdef"


@pytest.mark.parametrize("given", GRAMMARS, ids=[str(number) for number in range(len(GRAMMARS))])
def test_advance_takes_the_tokens_whose_bits_are_on_and_no_others(given):
    automaton = compiled(**given)
    for length in (0, 1, 3):
        _, state = random_walk(automaton, seed=length, most=length)
        taken = [token for token in range(-1, SIZE + 40) if automaton.advance(state, token) is not None]
        assert taken == on(automaton, state)


def test_bits_have_the_layout_of_packed_bits_and_cannot_be_changed():
    automaton = compiled(regex="[a-z]+")
    bits = automaton.bits(automaton.start)
    assert bits.dtype == np.uint32 and bits.shape == (num_words(SIZE),)
    mask = np.zeros(SIZE, bool)
    mask[on(automaton, automaton.start)] = True
    assert (bits == packed_bits(mask)).all()
    with pytest.raises(ValueError, match="read-only"):
        bits[0] = 0
    assert automaton.bits(automaton.start) is bits


def test_forced_text_has_the_spelling_of_the_tokenizer_alone():
    """llguidance itself would take other spellings, and so would plain decoding and drafts part."""
    automaton = compiled(regex=FORCED)
    first = tokens_of(FORCED)[0]
    shorter = next(token for token, piece in PIECES.items() if piece == FORCED[:1].encode())
    parser = automaton.start.track.parser
    assert shorter != first and parser.deep_copy().validate_tokens([shorter]) == 1
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


def test_a_token_may_be_an_integer_of_numpy():
    automaton = compiled(regex="[ab]{3}")
    token = np.int32(on(automaton, automaton.start)[0])
    assert automaton.advance(automaton.start, token) is automaton.advance(automaton.start, int(token)) is not None


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


def test_an_output_that_no_token_can_continue_is_an_error_and_no_end():
    automaton = compiled(grammar='start: "a" <|end|> "b"')  # a token that ends outputs cannot be text
    state = automaton.advance(automaton.start, tokens_of("a")[0])
    with pytest.raises(ConstraintError, match="^structured_outputs: no token is allowed here"):
        automaton.bits(state)


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


def test_a_grammar_that_was_given_up_is_refused_at_once(monkeypatch):
    own, params = Guidance(TOKENIZER_JSON, SIZE, [EOS]), StructuredOutputsParams(regex="a")
    assert own.known(params) is None
    automaton = own.compile(params)
    assert own.known(params) is automaton
    own.give_up(params, "it took too long")
    for find in (own.known, own.compile):
        with pytest.raises(ValueError, match="structured_outputs.regex: it took too long"):
            find(params)


def test_the_latest_grammars_stay_compiled(monkeypatch):
    monkeypatch.setattr(guidance_module, "MOST_GRAMMARS", 2)
    calls = counted(monkeypatch)
    own = Guidance(TOKENIZER_JSON, SIZE, [EOS])
    a, b, c = (StructuredOutputsParams(regex=letter) for letter in "abc")
    for params in (a, b, a, c, a, b):
        own.compile(params)
    assert [params.text for params in calls] == ["a", "b", "c", "b"] and len(own._compiled) == 2


@pytest.mark.parametrize("kept_depth", [0, KEPT_DEPTH])
def test_threads_that_ask_for_one_grammar_compile_it_once_and_find_the_same_states(kept_depth, monkeypatch):
    expected = [random_walk(compiled(**GRAMMARS[0]), seed, most=60)[0] for seed in range(4)]
    monkeypatch.setattr(guidance_module, "KEPT_DEPTH", kept_depth)
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
