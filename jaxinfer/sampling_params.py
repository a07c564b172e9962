"""Sampling parameters of a request; names and meanings follow vLLM and OpenAI."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.limits import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_SAMPLES

_UINT64 = 2**64
# Devices compute in float32. Within these limits, products with logits and sums of them stay finite.
_LARGE, _SMALL = 1e30, 1e-30
_SMALLEST = 2.0**-126  # smaller numbers count as 0 on some devices


def _is_number(value: Any, kind: type) -> bool:
    allowed = numbers.Integral if kind is int else numbers.Real
    return isinstance(value, allowed) and not isinstance(value, bool)


def _plain(value: Any, kind: type) -> Any:
    """Return a number (of NumPy, say) as Python's own type, whose sums and comparisons do not overflow."""
    try:
        return kind(value)
    except OverflowError:  # an integer beyond all floats
        return float("inf") if value > 0 else float("-inf")


def _is_token(value: Any) -> bool:
    return _is_number(value, int) and value >= 0


def _is_bias(value: Any) -> bool:
    return _is_number(value, float) and -100 <= value <= 100


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. A bad value raises ValueError, naming field and value.

    Filters apply in vLLM's order: temperature, min_p, top_k, top_p.

    Args:
        n: completions per prompt.
        temperature: divides the logits before min_p, top_k and top_p apply; 0 is greedy, and so is a value below the
            smallest normal float32.
        top_p: keep the most likely tokens up to this share, in (0, 1], of the probability that min_p and top_k leave.
        top_k: keep this many most likely tokens; 0, -1 or at least the size of the vocabulary is off.
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once or per occurrence.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or output; 1 is off.
        logit_bias: token id -> number in [-100, 100] that is added to its logit.
        allowed_token_ids: the only tokens that may be sampled.
        bad_words: texts that the output never completes, with or without a space before them.
        structured_outputs: the grammar that the output follows; a dict has the arguments of `StructuredOutputsParams`.
        logprobs, prompt_logprobs: return log probabilities of each token and of this many most likely ones, by the
            model's own distribution (before temperature and adjustments), unless the engine's `logprobs_mode` says
            otherwise for sampled tokens.
        seed: the request's random numbers are a function of the seed and the token's position alone. Sample i of `n`
            has seed + i, so choose seeds at least n apart; equal seeds give different prompts equal noise at equal
            positions.
        stop: strings that end the output (they are not part of it unless `include_stop_str_in_output`).
        include_stop_str_in_output: keep the stop string at the end of the text.
        stop_token_ids: tokens that end the output, besides the checkpoint's end-of-sequence tokens.
        ignore_eos: continue after the checkpoint's end-of-sequence tokens.
        min_tokens: sample no end-of-sequence or stop token before this many tokens, and match no stop string in them.
        max_tokens: most tokens per completion; None: as many as `max_model_len` leaves.
        skip_reading_prefix_cache: compute the whole prompt, even if a prefix of it is cached.
        return_token_sources: say of each token whether it was drawn, was an accepted draft, was drawn again because a
            grammar refused the first draw, or was forced because a grammar allowed nothing else.
        return_blocks: return the blocks of a diffusion model as they are after each round. A round that is computed
            again, after a preemption say, comes again.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: return text; False: token ids only.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_sources: bool = False
    return_blocks: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    skip_reading_prefix_cache: bool = False
    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        self._check("n", int, lambda x: 1 <= x <= MAX_SAMPLES, f"an integer in [1, {MAX_SAMPLES}]")
        self._check("temperature", float, lambda x: 0 <= x <= _LARGE, f"a number in [0, {_LARGE:g}]")
        self._check("top_p", float, lambda x: 0 < x <= 1, "a number in (0, 1]")
        self._check("top_k", int, lambda x: x >= -1, "an integer: -1 or 0 (off) or at least 1")
        self._check("min_p", float, lambda x: 0 <= x <= 1, "a number in [0, 1]")
        if self.seed is not None:
            self._check("seed", int, lambda x: -_UINT64 < x < _UINT64, "a 64-bit integer or None")
        self._check("min_tokens", int, lambda x: x >= 0, "an integer of at least 0")
        if self.max_tokens is not None:
            self._check("max_tokens", int, lambda x: x >= 1, "an integer of at least 1, or None")
            limit = self.max_tokens
            self._check("min_tokens", int, lambda x: x <= limit, f"at most max_tokens ({limit})")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, float, lambda x: -2 <= x <= 2, "a number in [-2, 2]")
        self._check(
            "repetition_penalty", float, lambda x: _SMALL <= x <= _LARGE, f"a number in [{_SMALL:g}, {_LARGE:g}]"
        )
        if self.temperature < _SMALLEST:
            self._set("temperature", 0.0)
        self._set("top_p", max(self.top_p, _SMALLEST))
        self._set("stop_strings", self._as_strings(self.stop))
        if self.stop_strings and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True")
        self._check_tokens("stop_token_ids", "a list of non-negative integers", least=0)
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "return_token_sources",
            "return_blocks",
            "skip_special_tokens",
            "detokenize",
            "skip_reading_prefix_cache",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check(name, int, lambda x: 0 <= x <= MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}], or None")
        self._check_tokens("allowed_token_ids", "a non-empty list of token ids", least=1)
        bias = self.logit_bias
        if bias is not None and not (
            isinstance(bias, Mapping) and all(_is_token(t) and _is_bias(b) for t, b in bias.items())
        ):
            raise ValueError(f"logit_bias must map token ids to numbers in [-100, 100], got {bias!r}")
        if bias is not None and len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}")
        if bias is not None:
            self._set("logit_bias", {int(token): float(added) for token, added in bias.items()})
        if self.bad_words is not None:
            words = list(self.bad_words) if _is_sequence(self.bad_words) else [None]
            if not all(isinstance(word, str) and word for word in words):
                raise ValueError(f"bad_words must be a list of non-empty strings, got {self.bad_words!r}")
            self._set("bad_words", words)
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self, name: str, kind: type, ok: Callable[[Any], bool], allowed: str) -> None:
        value = getattr(self, name)
        if not (_is_number(value, kind) and ok(_plain(value, kind))):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")
        self._set(name, _plain(value, kind))

    def _check_tokens(self, name: str, allowed: str, *, least: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        tokens = list(value) if _is_sequence(value) else []
        if not _is_sequence(value) or len(tokens) < least or not all(_is_token(token) for token in tokens):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")
        tokens = [int(token) for token in tokens]
        self._set(name, tuple(tokens) if isinstance(value, tuple) else tokens)

    @staticmethod
    def _as_strings(stop: Any) -> tuple[str, ...]:
        if stop is None:
            return ()
        strings = [stop] if isinstance(stop, str) else list(stop) if _is_sequence(stop) else []
        if not strings and stop != [] and stop != () or not all(isinstance(text, str) and text for text in strings):
            raise ValueError(f"stop must be a non-empty string or a list of them, got {stop!r}")
        return tuple(strings)

    @classmethod
    def from_generation_config(cls, generation_config: Mapping[str, Any], **given: Any) -> SamplingParams:
        """Return the given parameters, with defaults from a checkpoint's `generation_config.json`."""
        defaults: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if generation_config.get(name) is not None:
                defaults[name] = generation_config[name]
        if generation_config.get("do_sample") is False:
            defaults["temperature"] = 0.0
        return cls(**{**defaults, **given})
