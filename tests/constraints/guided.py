"""Grammars over the embedded tokenizer, and random walks through their automata."""

import functools
import random
from pathlib import Path

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLParserLimits

from jaxinfer.constraints.guidance import Guidance, GuidanceAutomaton
from jaxinfer.constraints.guidance_grammar import grammar_of
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.sampling.bounds import num_words

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"
TOKENIZER_JSON = (TINY / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = tokenizers.Tokenizer.from_str(TOKENIZER_JSON)
NUM_TOKENS = TOKENIZER.get_vocab_size(with_added_tokens=True)
SIZE = NUM_TOKENS + 45  # logits: padded, and no multiple of a word of bits
EOS = TOKENIZER.token_to_id("<|end|>")
EOS_TOO = TOKENIZER.token_to_id("<|endoftext|>")
ADDED = TOKENIZER.get_added_tokens_decoder()
SPECIAL = {token for token, about in ADDED.items() if about.special}
# The byte that each letter of a byte-level vocabulary stands for: printable ones of Latin-1 for themselves, and letters
# from U+0100 on for the other bytes.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
PIECES = {
    token: text.encode() if token in ADDED else bytes(_BYTE_OF_LETTER[letter] for letter in text)
    for text, token in TOKENIZER.get_vocab(with_added_tokens=True).items()
    if token not in SPECIAL
}
TOKEN_OF_BYTE = {piece[0]: token for token, piece in PIECES.items() if len(piece) == 1}

# Orders in which parts of a JSON text come to its end: outside of strings, bytes that close; then short values.
_CLOSING = (b"}", b"]", b"null", b"n", b"u", b"l", b"true", b"t", b"r", b"e", b"0", b"1", b'"', b":", b",", b".", b"-")


@functools.cache
def guidance() -> Guidance:
    return Guidance(TOKENIZER_JSON, SIZE, [EOS, EOS_TOO])


def compiled(**given) -> GuidanceAutomaton:
    return guidance().compile(StructuredOutputsParams(**given))


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_of(tokens: list[int]) -> bytes:
    return b"".join(PIECES[token] for token in tokens)


def fresh_bits(given, tokens):
    """The bits after tokens as a new matcher finds them, which no other token was ever shown to."""
    tokenizer = guidance()._llguidance_tokenizer()
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar_of(StructuredOutputsParams(**given)), log_level=0, limits=limits)
    for token in tokens:
        assert matcher.consume_token(token)
    return np.frombuffer(matcher.compute_bitmask(), np.uint32)[: num_words(SIZE)]


def on(automaton, state) -> list[int]:
    """The tokens whose bits are on, ascending."""
    return np.flatnonzero(np.unpackbits(automaton.bits(state).view(np.uint8), bitorder="little")).tolist()


def after(automaton, text: str):
    """The state after a text, in the tokenizer's own spelling; None once a token is not allowed."""
    state = automaton.start
    for token in tokens_of(text):
        if state is not None:
            state = automaton.advance(state, token)
    return state


def accepts(automaton, text: str) -> bool:
    """Whether the text, byte by byte or in the tokenizer's own spelling, is one that the grammar accepts."""
    for tokens in (tokens_of(text), [TOKEN_OF_BYTE[byte] for byte in text.encode()]):
        state = automaton.start
        for token in tokens:
            state = state and automaton.advance(state, token)
        if state is not None and automaton.is_final(state):
            return True
    return False


def random_walk(automaton, seed: int, most: int):
    """(tokens, state) after tokens drawn uniformly from those allowed, until an end or `most` tokens."""
    rng, state, tokens = random.Random(seed), automaton.start, []
    while len(tokens) < most:
        token = rng.choice(on(automaton, state))
        if token in (EOS, EOS_TOO):
            break
        state = automaton.advance(state, token)
        tokens.append(token)
    return tokens, state


def completion(automaton, state, text: bytes, *, attempts: int = 40, most: int = 300) -> list[int]:
    """Tokens after which the output is complete, the fewest of several attempts that close what is open.

    Args:
        text: what was written before, by which a string is known to be open.

    Raises:
        AssertionError: no attempt came to an end.
    """
    found: list[list[int]] = []
    for seed in range(attempts):
        tokens = _closing_walk(automaton, state, Strings(text), random.Random(seed), most)
        if tokens is not None:
            found.append(tokens)
        if len(found) == 3:
            break
    assert found, f"no end was found after {text[-200:]!r}"
    return min(found, key=len)


class Strings:
    """Where a JSON text is: in a string, in an escape of one, or outside."""

    def __init__(self, text: bytes) -> None:
        self.inside = self.escaped = False
        self.read(text)

    def read(self, text: bytes) -> None:
        for byte in text:
            if self.escaped:
                self.escaped = False
            elif byte == ord("\\") and self.inside:
                self.escaped = True
            elif byte == ord('"'):
                self.inside = not self.inside


def _closing_walk(automaton, state, at: Strings, rng: random.Random, most: int) -> list[int] | None:
    tokens: list[int] = []
    while not automaton.is_final(state):
        if len(tokens) == most:
            return None
        allowed = [token for token in on(automaton, state) if token in PIECES]
        short = [token for token in allowed if len(PIECES[token]) == 1] or allowed
        wanted = [b'"'] if at.inside and not at.escaped else [] if at.escaped else _CLOSING
        pieces = {PIECES[token]: token for token in allowed}
        closing = [pieces[piece] for piece in wanted if piece in pieces]
        token = closing[0] if closing and (at.inside or rng.random() < 0.9) else rng.choice(short)
        at.read(PIECES[token])
        tokens.append(token)
        state = automaton.advance(state, token)
    return tokens


# Of every kind, with text that is forced and text that is not.
GRAMMARS = [
    {"json": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a"]}},
    {"json": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}},
    {"json_object": True, "disable_any_whitespace": True},
    {"regex": "(ab|[0-9]{2,5}|日本)+!?"},
    {"choice": ["yes", "no", "no way", "日本語"]},
    {"grammar": 'start: "(" start ")" | /[a-z ]+/'},
]
