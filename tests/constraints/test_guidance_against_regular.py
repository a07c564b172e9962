"""Masks of grammars against this engine's own automata and against searches through all texts."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from jaxinfer.constraints.automaton import RegularAutomaton
from jaxinfer.constraints.characters import Characters
from jaxinfer.constraints.guidance import Guidance
from jaxinfer.constraints.regular import character, choice, literal, repeat, sequence
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.tokenizer import Tokenizer
from tests.constraints.guided import EOS, EOS_TOO, PIECES, SIZE, compiled, on

VOCABULARY = Vocabulary([PIECES.get(token) for token in range(max(PIECES) + 1)], size=SIZE)
LETTERS = character(Characters(((ord("a"), ord("z")),)))
DIGITS = character(Characters(((ord("0"), ord("9")),)))
PAIRS = {
    "[a-z]{2,9}": repeat(LETTERS, 2, 9),
    "([a-z]+[0-9]{1,3} )*end": sequence(
        repeat(sequence(repeat(LETTERS, 1, None), repeat(DIGITS, 1, 3), literal(" ")), 0, None), literal("end")
    ),
    "a|ab|abc|hello|help me": choice(*map(literal, ("a", "ab", "abc", "hello", "help me"))),
    "(日本|é[^\\n]){2}": repeat(
        choice(literal("日本"), sequence(literal("é"), character(Characters.but(Characters.of("\n"))))), 2, 2
    ),
}


def regular(pattern):
    return RegularAutomaton(PAIRS[pattern], VOCABULARY, [EOS, EOS_TOO])


def is_one_spelling(mine, theirs):
    """Whether one set has one of the other's tokens, which all begin with the same byte."""
    return len(mine) == 1 and set(mine) <= set(theirs) and len({PIECES.get(token, b"")[:1] for token in theirs}) == 1


def differences(grammar, automaton, seed):
    """Where a walk's sets differ other than by spellings of forced text, of which a grammar allows one."""
    rng, found = random.Random(seed), []
    states = grammar.start, automaton.start
    for _ in range(30):
        mine, theirs = on(grammar, states[0]), on(automaton, states[1])
        if mine != theirs and not is_one_spelling(mine, theirs):
            found.append((mine[:5], theirs[:5]))
        if grammar.is_final(states[0]) != automaton.is_final(states[1]):
            found.append("final")
        token = rng.choice(mine)
        if token in (EOS, EOS_TOO):
            break
        states = grammar.advance(states[0], token), automaton.advance(states[1], token)
    return found


@pytest.mark.parametrize("pattern", PAIRS)
@pytest.mark.parametrize("seed", range(5))
def test_a_regex_allows_what_the_same_expression_allows_but_for_spellings_of_forced_text(pattern, seed):
    assert differences(compiled(regex=pattern), regular(pattern), seed) == []


def test_a_regex_of_other_texts_is_found_out():
    assert differences(compiled(regex="[a-y]{2,9}"), regular("[a-z]{2,9}"), 0) != []


TEXTS = ["kettle", "kernel", "ker", "日本語", "日", "a b c", "a b", "étude", "etude"]


@pytest.mark.parametrize("seed", range(5))
def test_a_choice_allows_tokens_that_continue_one_of_its_texts(seed):
    automaton, rng = compiled(choice=TEXTS), random.Random(seed)
    state, written, texts = automaton.start, b"", [text.encode() for text in TEXTS]
    while True:
        expected = {token for token, piece in PIECES.items() if any(text.startswith(written + piece) for text in texts)}
        assert automaton.is_final(state) == (written in texts)
        allowed = {token for token in on(automaton, state) if token in PIECES}
        assert allowed == expected or is_one_spelling(allowed, expected)
        if not allowed:
            break
        token = rng.choice(sorted(allowed))
        state, written = automaton.advance(state, token), written + PIECES[token]
    assert written in texts


ANYTHING = repeat(character(Characters.but()), 0, None)
WORDS = ["<unk>", "▁the", "▁", "ca", "fé", "日", "!", *(f"<0x{byte:02X}>" for byte in range(255))]


def saved(directory, decoder):
    """A tokenizer of words with this decoder, of which one token is special and one is not, though added too."""
    fast = tokenizers.Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(WORDS)}, merges=[]))
    fast.decoder = decoder
    fast.add_tokens([AddedToken("[PLAN]", special=False)])
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(directory)


def test_tokens_with_byte_fallback_are_the_bytes_that_they_are_for_regular_automata(tmp_path):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer, size, eos = saved(tmp_path, decoders.Sequence(steps)), len(WORDS) + 9, len(WORDS) + 1
    grammar = Guidance.of(tokenizer, size, [eos]).compile(StructuredOutputsParams(regex="(?s:.*)"))
    automaton = RegularAutomaton(ANYTHING, Vocabulary.from_tokenizer(tokenizer, size), [eos])
    rng, states = random.Random(0), (grammar.start, automaton.start)
    for _ in range(30):
        assert on(grammar, states[0]) == on(automaton, states[1])
        token = rng.choice([token for token in on(grammar, states[0]) if token != eos])
        states = grammar.advance(states[0], token), automaton.advance(states[1], token)


@pytest.mark.parametrize(
    ("decoder", "eos", "reason"),
    [
        (decoders.Metaspace(), 0, "can't determine decoder type"),
        (decoders.ByteLevel(), len(WORDS) + 2, f"EOS token ID {len(WORDS) + 2} is out of range"),
    ],
)
def test_a_tokenizer_whose_bytes_are_not_known_and_one_without_the_end_are_refused(decoder, eos, reason, tmp_path):
    own = Guidance.of(saved(tmp_path, decoder), len(WORDS) + 9, [eos])
    with pytest.raises(ValueError, match=f"no grammar can be followed with this tokenizer .*{reason}"):
        own.compile(StructuredOutputsParams(regex="a"))
