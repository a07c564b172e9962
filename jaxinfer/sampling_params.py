"""What a user asks of one generation; names and meanings follow vLLM and OpenAI."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.limits import MAX_LOGPROBS

_UINT64 = 2**64


def _is_number(value: Any, kind: type) -> bool:
    allowed = numbers.Integral if kind is int else numbers.Real
    return isinstance(value, allowed) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return _is_number(value, int) and value >= 0


def _is_bias(value: Any) -> bool:
    return _is_number(value, float) and -100 <= value <= 100


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Bad values raise ValueError naming field and value.

    Args:
        n: completions per prompt.
        temperature: 0 is greedy; applies before top_k, top_p and min_p.
        top_p: keep the most likely tokens up to this probability mass, in (0, 1].
        top_k: keep this many tokens; 0 or -1 is off.
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once or per occurrence.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or output; 1 is off.
        logit_bias: token id -> number in [-100, 100] that is added to its logit.
        allowed_token_ids: no other tokens are sampled.
        bad_words: texts that are never completed, with or without a space before them.
        logprobs, prompt_logprobs: log probabilities of each token and of that many most likely ones, by the model's own
            distribution (before temperature and adjustments).
        seed: the request's random numbers are a function of the seed and the token's position alone.
        stop: strings that end the text (they are not part of it unless `include_stop_str_in_output`).
        stop_token_ids: tokens that end it, besides the checkpoint's end-of-sequence tokens.
        ignore_eos: go on after the checkpoint's end-of-sequence tokens.
        min_tokens: no end-of-sequence or stop token before this many tokens, no stop string in their text.
        max_tokens: tokens per completion; None: as many as `max_model_len` leaves.
        skip_reading_prefix_cache: compute the whole prompt, even where its beginning is cached.
        skip_special_tokens, detokenize: how text is made of tokens, if at all.
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
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    skip_reading_prefix_cache: bool = False
    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        self._check("n", int, lambda x: x >= 1, "an integer of at least 1")
        self._check("temperature", float, lambda x: 0 <= x < float("inf"), "a finite number of at least 0")
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
        self._check("repetition_penalty", float, lambda x: 0 < x < float("inf"), "a finite number above 0")
        object.__setattr__(self, "stop_strings", self._as_strings(self.stop))
        if self.stop_strings and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True")
        ids = self.stop_token_ids
        if ids is not None and not (_is_sequence(ids) and all(_is_token(x) for x in ids)):
            raise ValueError(f"stop_token_ids must be a list of non-negative integers, got {ids!r}")

        if not isinstance(self.skip_reading_prefix_cache, bool):
            raise ValueError(f"skip_reading_prefix_cache must be True or False, got {self.skip_reading_prefix_cache!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check(name, int, lambda x: 0 <= x <= MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}], or None")
        allowed = self.allowed_token_ids
        if allowed is not None and not (_is_sequence(allowed) and allowed and all(_is_token(x) for x in allowed)):
            raise ValueError(f"allowed_token_ids must be a non-empty list of token ids, got {allowed!r}")
        bias = self.logit_bias
        if bias is not None and not (
            isinstance(bias, Mapping) and all(_is_token(t) and _is_bias(b) for t, b in bias.items())
        ):
            raise ValueError(f"logit_bias must map token ids to numbers in [-100, 100], got {bias!r}")
        words = self.bad_words
        if words is not None and not (_is_sequence(words) and all(isinstance(w, str) and w for w in words)):
            raise ValueError(f"bad_words must be a list of non-empty strings, got {words!r}")

    def _check(self, name: str, kind: type, ok: Callable[[Any], bool], allowed: str) -> None:
        value = getattr(self, name)
        if not (_is_number(value, kind) and ok(value)):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")

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
        """Parameters with a checkpoint's `generation_config.json` as defaults below what the user gave."""
        defaults: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if generation_config.get(name) is not None:
                defaults[name] = generation_config[name]
        if generation_config.get("do_sample") is False:
            defaults["temperature"] = 0.0
        return cls(**{**defaults, **given})
