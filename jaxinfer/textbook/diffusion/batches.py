"""Batches that scripts give to a diffusion worker: prompts with their sampling parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxinfer.field_checks import check_positive_integer
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling_params import SamplingParams

_WORD = 2**32


@dataclass
class ModelWorkerBatch:
    """A batch as a script writes it. Any object with some of these attributes can take its place.

    Attributes:
        input_ids: token ids of the prompts.
        max_new_tokens, temperature: for all requests, or a list with one for each. A temperature of 0 is greedy.
        seeds: of sampling, one for each request; with a single number s, request i has s + i.
        eos_token_ids: tokens that end a sequence; None: the model's.
        top_p, top_k: filters of sampling, for all requests or a list with one for each, as in `SamplingParams`: top_k
            keeps so many most likely tokens, 0 or -1 is off; then top_p keeps those up to this share of the
            probability, 1.0 is off. The temperature comes before both. Greedy requests do not read them.
    """

    input_ids: Sequence[Sequence[int]]
    max_new_tokens: int | Sequence[int] = 64
    temperature: float | Sequence[float] = 0.0
    seeds: int | Sequence[int] = 0
    eos_token_ids: Collection[int] | None = None
    top_p: float | Sequence[float] = 1.0
    top_k: int | Sequence[int] = 0


class HasModel(Protocol):
    @property
    def model(self) -> DecoderLM: ...


@dataclass(frozen=True)
class ForwardBatch:
    """A checked batch with one entry for each of R requests."""

    input_ids: list[list[int]]
    max_new_tokens: list[int]
    temperature: list[float]
    request_keys: list[tuple[int, int]]  # key of the noise, as two 32-bit words
    eos_token_ids: frozenset[int]
    top_p: list[float]  # 1.0: off
    top_k: list[int]  # 0: off

    @property
    def batch_size(self) -> int:
        return len(self.input_ids)

    @classmethod
    def init_new(cls, batch: Any, owner: HasModel) -> ForwardBatch:
        """Make the forward batch of a `ModelWorkerBatch`, or of an object with its attributes (the rest are defaults).

        Args:
            owner: a worker or an iteration, whose model gives the ending tokens if the batch does not.

        Raises:
            ValueError: there is no request; a list does not have an entry for each request; or a value is out of range,
                which the message names.
        """
        prompts = [[int(token) for token in prompt] for prompt in batch.input_ids]
        if not prompts:
            raise ValueError("input_ids must have at least one prompt, got none")

        def each(name: str) -> list[Any]:
            value = getattr(batch, name, getattr(ModelWorkerBatch, name))
            if not isinstance(value, Sequence):
                return [value] * len(prompts)
            if len(value) != len(prompts):
                raise ValueError(f"{name} has {len(value)} entries for {len(prompts)} requests")
            return list(value)

        max_new_tokens, temperature, seeds = each("max_new_tokens"), each("temperature"), each("seeds")
        top_p, top_k = each("top_p"), each("top_k")
        if not isinstance(getattr(batch, "seeds", 0), Sequence):
            seeds = [seed + index for index, seed in enumerate(seeds)]
        for count in max_new_tokens:
            check_positive_integer("max_new_tokens", count)
        for value in temperature:
            if not value >= 0:
                raise ValueError(f"temperature must be 0 or more, got {value!r}")
        checked = [
            SamplingParams(temperature=heat, top_p=share, top_k=count)
            for heat, share, count in zip(temperature, top_p, top_k, strict=True)
        ]
        vocab_size = owner.model.config.vocab_size
        eos = getattr(batch, "eos_token_ids", None)
        return cls(
            prompts,
            max_new_tokens,
            [params.temperature for params in checked],
            [divmod(seed % _WORD**2, _WORD) for seed in seeds],
            frozenset(owner.model.config.eos_token_ids if eos is None else eos),
            [params.top_p for params in checked],
            [min(max(params.top_k, 0), vocab_size) for params in checked],
        )
