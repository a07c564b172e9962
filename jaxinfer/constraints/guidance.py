"""Grammars of structured output as token automata: llguidance's parsers as states that are functions of the tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.guidance_grammar import grammar_of, one_line
from jaxinfer.constraints.guidance_states import KEPT_DEPTH, GuidanceState, KeptStates, Track
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.sampling.bounds import WORD_BITS, num_words, packed_bits
from jaxinfer.tokenizer import Tokenizer

# What one mask may cost before its request ends with an error, lest it stop all others. Masks of usual schemas take
# far less; one of 300 optional properties that begin alike takes over 10,000 items, and an enum of 2,000 over 50,000
# units of fuel. Where rules are very ambiguous (`s: s s | "a"`), an item may take 10 microseconds.
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 20_000
MAX_ITEMS_IN_ROW = 2_000
# What a grammar may cost when it is compiled.
INITIAL_LEXER_FUEL = 1_000_000
MAX_GRAMMAR_SIZE = 500_000
MAX_LEXER_STATES = 50_000  # 1 to 2 KB each
MOST_GRAMMARS = 128  # that stay compiled
_WORDS = np.dtype("<u4")
_NO_TOKEN = "no token is allowed here: nothing that the vocabulary can spell leads to a text that the grammar accepts"
_MOST_KEPT_STATES = 512


class GuidanceAutomaton:
    """Automaton over tokens that follows one compiled grammar; implements `TokenAutomaton`.

    A token is allowed if its bit is on in llguidance's mask, which of several spellings of a forced text has the
    tokenizer's own only. End-of-sequence tokens are allowed where the grammar accepts, and after themselves; the
    parser never sees one. States after the same tokens are mostly the same object. Any thread may use any state.

    Where the bits of a state cannot be found, what asks for them raises ConstraintError, each time with the same
    message; the states before it and beside it are as they were.

    llguidance limits what a mask may cost by counting work that it has not cached: whether a mask just above a limit
    is found may depend on the masks that were found before it.
    """

    def __init__(self, matcher: LLMatcher, tokens: _Tokens, kept: KeptStates) -> None:
        self._tokens, self._kept = tokens, kept
        self._ended = GuidanceState(None, 0)
        self._ended.bits, self._ended.num_allowed = tokens.eos_bits, len(tokens.eos)
        self._track = Track(matcher, [])  # stays at the start
        self.start = GuidanceState(self._track, 0)

    def advance(self, state: GuidanceState, token: int) -> GuidanceState | None:
        """The state after a token; None for a token whose bit is off.

        Raises:
            ConstraintError: the bits of `state` cannot be found. Those of the state after it are found later.
        """
        if not 0 <= token < self._tokens.size or not _is_on(self.bits(state), token):
            return None
        if token in self._tokens.eos:
            return self._ended
        with state.lock:
            following = state.child(token)
            if following is None:
                following = self._after(state, token)
                state.add_child(token, following)
        if following.depth <= KEPT_DEPTH:
            self._kept.use(following)
        return following

    def bits(self, state: GuidanceState) -> np.ndarray:
        """The tokens that `advance` takes, as read-only bits uint32 [ceil(vocabulary / 32)]; found once.

        Raises:
            ConstraintError: llguidance cannot find them within its limits, or no token is allowed.
        """
        if state.bits is None:
            with state.lock:
                if state.bits is None and state.error is None:
                    self._find_bits(state)
        if state.bits is None:
            raise ConstraintError(f"structured_outputs: {state.error}")
        return state.bits

    def is_final(self, state: GuidanceState) -> bool:
        """Whether the output is complete: end-of-sequence tokens are allowed."""
        return _is_on(self.bits(state), self._tokens.any_eos)

    def forced(self, state: GuidanceState) -> int | None:
        """The only token that may come, if there is exactly one and it does not end the sequence."""
        if self._num_allowed(state) != 1 or self.is_final(state):
            return None
        bits = self.bits(state)
        word = int(np.flatnonzero(bits)[0])
        return word * WORD_BITS + int(bits[word]).bit_length() - 1

    def ends(self, state: GuidanceState) -> bool:
        """Whether nothing but end-of-sequence tokens may come."""
        return self.is_final(state) and self._num_allowed(state) == len(self._tokens.eos)

    def _num_allowed(self, state: GuidanceState) -> int:
        if state.num_allowed < 0:
            state.num_allowed = int(np.bitwise_count(self.bits(state)).sum())
        return state.num_allowed

    def _after(self, state: GuidanceState, token: int) -> GuidanceState:
        """Return a new state after an allowed token; the state's lock is held."""
        track = state.track
        assert track is not None
        with track.lock:
            if state.depth <= KEPT_DEPTH or len(track.tokens) != state.depth or track.parser is None:
                track = track.branch(state.depth, self._track)
            message = track.read(token)
        following = GuidanceState(track, state.depth + 1)
        if message is not None:  # an allowed token is refused when a limit is reached
            _fail(following, message)
        return following

    def _find_bits(self, state: GuidanceState) -> None:
        """Set the bits of a state, or its error; its lock is held."""
        track = state.track
        assert track is not None
        with track.lock:
            parser = track.parser
            # No state is entered from one that has no bits.
            assert parser is not None and len(track.tokens) == state.depth
            words = parser.compute_bitmask()
            if parser.is_error():
                _fail(state, track.fail())
                return
            is_accepting = parser.is_accepting()
        # There may be a word too many. The bytes are read-only, and the array with them.
        bits = np.frombuffer(words, _WORDS)[: num_words(self._tokens.size)]
        bits = self._tokens.with_eos(bits, is_accepting)
        if is_accepting or np.count_nonzero(bits):
            state.bits = bits
        else:
            _fail(state, _NO_TOKEN)


class Guidance:
    """Compiler of the grammars of one engine; its methods may be called from any thread.

    Args:
        tokenizer_json: the text of the tokenizer's `tokenizer.json`, or a function that returns it, called once.
        vocab_size: the width of the logits, which may exceed the number of tokens: a token beyond is allowed
            only where a grammar names its id.
        eos_token_ids: tokens that end an output, at least one.

    Raises:
        ValueError: there are no end-of-sequence tokens, or one is not below `vocab_size`.
    """

    def __init__(
        self, tokenizer_json: str | Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        if not eos_token_ids or not all(0 <= token < vocab_size for token in eos_token_ids):
            raise ValueError(f"eos_token_ids must be tokens below {vocab_size}, got {sorted(eos_token_ids)}")
        self._tokenizer_json = tokenizer_json
        self._tokens = _Tokens(vocab_size, eos_token_ids)
        self._kept = KeptStates(_MOST_KEPT_STATES)
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple, _Compiled] = OrderedDict()

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> Guidance:
        """Return the compiler of an engine with this tokenizer, whose vocabulary is read when it is first needed."""
        return cls(tokenizer.fast.to_str, vocab_size, eos_token_ids)

    def compile(self, params: StructuredOutputsParams) -> GuidanceAutomaton:
        """Return the automaton of a grammar, whose first mask is found; the latest are kept, refusals included.

        The first call reads the vocabulary, which takes most of a second for a large one.

        Raises:
            ValueError: llguidance refuses the grammar or the tokenizer, or nothing can be written by the grammar.
        """
        key = params.key
        with self._lock:
            compiled = self._compiled.setdefault(key, _Compiled())
            self._compiled.move_to_end(key)
            while len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        with compiled.lock:  # others with this grammar wait, and find it compiled
            if compiled.automaton is None and compiled.refusal is None:
                self._compile(params, compiled)
        if compiled.automaton is None:
            raise ValueError(compiled.refusal)
        return compiled.automaton

    def known(self, params: StructuredOutputsParams) -> GuidanceAutomaton | None:
        """Return the automaton of a grammar if it is compiled.

        Raises:
            ValueError: it was refused.
        """
        with self._lock:
            compiled = self._compiled.get(params.key)
            if compiled is not None:
                self._compiled.move_to_end(params.key)
        if compiled is not None and compiled.refusal is not None:
            raise ValueError(compiled.refusal)
        return None if compiled is None else compiled.automaton

    def give_up(self, params: StructuredOutputsParams, reason: str) -> None:
        """Refuse a grammar from now on, whatever still compiles it."""
        compiled = _Compiled()
        compiled.refusal = f"structured_outputs.{params.kind}: {reason}"
        with self._lock:
            self._compiled[params.key] = compiled

    def _compile(self, params: StructuredOutputsParams, compiled: _Compiled) -> None:
        limits = LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW, initial_lexer_fuel=INITIAL_LEXER_FUEL, step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS, max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )  # fmt: skip
        matcher = LLMatcher(self._llguidance_tokenizer(), grammar_of(params), log_level=0, limits=limits)
        if matcher.is_error():
            compiled.refusal = f"structured_outputs.{params.kind}: {one_line(matcher.get_error())}"
            return
        automaton = GuidanceAutomaton(matcher, self._tokens, self._kept)
        try:
            automaton.bits(automaton.start)
        except ConstraintError:
            compiled.refusal = f"structured_outputs.{params.kind}: {automaton.start.error}"
        else:
            compiled.automaton = automaton

    def _llguidance_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                source = self._tokenizer_json
                text = source if isinstance(source, str) else source()
                try:
                    self._tokenizer = LLTokenizer(text, n_vocab=self._tokens.size, eos_token=sorted(self._tokens.eos))
                except Exception as error:  # whatever its parser raises, the reason is the tokenizer or its size
                    raise ValueError(
                        f"no grammar can be followed with this tokenizer and vocab_size={self._tokens.size}: "
                        f"{one_line(error)}"
                    ) from error
                self._tokenizer_json = ""  # may be large
            return self._tokenizer


class _Compiled:
    """A grammar in the cache: its automaton or why it was refused, once either is known."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.automaton: GuidanceAutomaton | None = None
        self.refusal: str | None = None


class _Tokens:
    """The size of a vocabulary, and its end-of-sequence tokens as a set and as bits."""

    def __init__(self, size: int, eos: Collection[int]) -> None:
        self.size, self.eos = size, frozenset(int(token) for token in eos)
        self.any_eos = min(self.eos)
        mask = np.zeros(size, bool)
        mask[list(self.eos)] = True
        self.eos_bits = packed_bits(mask)
        self.eos_bits.flags.writeable = False

    def with_eos(self, bits: np.ndarray, on: bool) -> np.ndarray:
        """Return read-only bits with those of all end-of-sequence tokens on, or off; a copy where they were not."""
        if all(_is_on(bits, token) == on for token in self.eos):
            return bits
        bits = bits | self.eos_bits if on else bits & ~self.eos_bits
        bits.flags.writeable = False
        return bits


def _is_on(bits: np.ndarray, token: int) -> bool:
    return bool(int(bits[token // WORD_BITS]) >> token % WORD_BITS & 1)


def _fail(state: GuidanceState, message: str) -> None:
    # llguidance's word for a text that ends before the grammar accepts it.
    state.error = _NO_TOKEN if message.startswith("NoExtension") else one_line(message)
