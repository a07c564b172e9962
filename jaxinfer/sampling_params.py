"""What a user asks of one generation; names and meanings follow vLLM and OpenAI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_UINT64 = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Bad values raise ValueError naming field and value.

    Args:
        n: completions per prompt.
        temperature: 0 is greedy; applies before top_k, top_p and min_p.
        top_p: keep the most likely tokens up to this probability mass, in (0, 1].
        top_k: keep this many tokens; 0 or -1 is off.
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        seed: the request's random numbers are a function of the seed and the token's position alone.
        stop: strings that end the text (they are not part of it unless `include_stop_str_in_output`).
        stop_token_ids: tokens that end it, besides the checkpoint's end-of-sequence tokens.
        ignore_eos: go on after the checkpoint's end-of-sequence tokens.
        min_tokens: no end-of-sequence or stop token before this many tokens, no stop string in their text.
        max_tokens: tokens per completion; None: as many as `max_model_len` leaves.
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
    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        self._check("n", self.n >= 1, "an integer of at least 1", int)
        self._check("temperature", 0 <= self.temperature < float("inf"), "a finite number of at least 0")
        self._check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._check("top_k", self.top_k >= -1, "an integer: -1 or 0 (off) or at least 1", int)
        self._check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        if self.seed is not None:
            self._check("seed", -_UINT64 < self.seed < _UINT64, "a 64-bit integer or None", int)
        self._check("min_tokens", self.min_tokens >= 0, "an integer of at least 0", int)
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens >= 1, "an integer of at least 1, or None", int)
            limit = f"at most max_tokens ({self.max_tokens})"
            self._check("min_tokens", self.min_tokens <= self.max_tokens, limit, int)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, -2 <= getattr(self, name) <= 2, "in [-2, 2]")
        self._check("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "a finite number above 0")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be non-empty strings, got {self.stop!r}")
        if stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True")
        object.__setattr__(self, "stop_strings", stop)
        for token in self.stop_token_ids or ():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ValueError(f"stop_token_ids must be non-negative integers, got {self.stop_token_ids!r}")

    def _check(self, name: str, ok: bool, allowed: str, kind: type = float) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not ok or not number or (kind is int and not isinstance(value, int)):
            raise ValueError(f"{name} must be {allowed}, got {value!r}")

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

    @property
    def unsupported(self) -> list[str]:
        """Names of fields whose value asks for something that the engine does not do yet."""
        default = {f.name: f.default for f in fields(self)}
        names = (
            "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
            "bad_words", "logprobs", "prompt_logprobs",
        )  # fmt: skip
        return [name for name in names if getattr(self, name) != default[name]]
