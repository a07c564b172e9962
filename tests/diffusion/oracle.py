"""The truth of block diffusion: a plain Python loop over whole sequences, in float32, without cache or batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.noise import gumbel
from kernels_pallas.rotate_and_write.reference import rotate
from tests.sampling.reference import Filters, probabilities_of

PADDED_LENGTH = 64

# (confidences, masked) of a block -> the places that are committed.
Rule = Callable[[np.ndarray, np.ndarray], set[int]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockAttend:
    """Every token sees its own block and those before."""

    block_size: int = field(metadata={"static": True})

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        q, k, v = rotate(heads)
        block = jnp.arange(k.shape[-3]) // self.block_size
        return masked_attention(q, k, v, block[:, None] >= block[None, :]), kv


@functools.lru_cache(maxsize=8)
def _logits_function(model: DecoderLM) -> Callable[[np.ndarray], jax.Array]:
    graph, state = nnx.split(model)
    assert model.config.block_size is not None
    attend = BlockAttend(model.config.block_size)

    @jax.jit
    def logits(state: nnx.State, ids: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        return model.logits(model(ids, jnp.arange(ids.shape[0]), attend))

    return lambda ids: logits(state, ids)


def block_logits(model: DecoderLM, ids: Sequence[int], start: int) -> np.ndarray:
    """float32 [B, vocab]: logits of the block at `start`, of the sequence that ends with it."""
    padded = np.zeros(-(-len(ids) // PADDED_LENGTH) * PADDED_LENGTH, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(_logits_function(model)(padded))[start : len(ids)]


def by_threshold(threshold: float) -> Rule:
    def rule(confidence: np.ndarray, masked: np.ndarray) -> set[int]:
        bound = min(np.float32(threshold), max(confidence[masked]) - np.float32(1e-5))
        return {int(place) for place in np.flatnonzero(masked) if confidence[place] >= bound}

    return rule


def by_hierarchy(threshold: float, low: float) -> Rule:
    def rule(confidence: np.ndarray, masked: np.ndarray) -> set[int]:
        places = [int(place) for place in np.flatnonzero(masked)]
        found = {place for place in places if confidence[place] > threshold}
        found.add(max(places, key=lambda place: (confidence[place], -place)))
        run: list[int] = []
        for place in [*places, -1]:
            if run and place != run[-1] + 1:
                best = max(run, key=lambda place: (confidence[place], -place))
                if confidence[best] > low:
                    found.add(best)
                run = []
            run.append(place)
        return found

    return rule


def by_factor(factor: float) -> Rule:
    def rule(confidence: np.ndarray, masked: np.ndarray) -> set[int]:
        found: set[int] = set()
        order = sorted((int(place) for place in np.flatnonzero(masked)), key=lambda place: (-confidence[place], place))
        for number, place in enumerate(order, start=1):
            if number > 1 and confidence[place] < 1 - factor / (number + 1):
                break
            found.add(place)
        return found

    return rule


@dataclass
class Generated:
    tokens: list[int]
    rounds: list[tuple[int, tuple[int, ...]]]  # (start of the block, its tokens after the round)
    logprobs: list[float]


def generate(
    model: DecoderLM,
    prompt: Sequence[int],
    num_tokens: int,
    rule: Rule,
    *,
    eos: Sequence[int] = (),
    filters: Filters | None = None,
    request_key: tuple[int, int] = (0, 0),
    edit_threshold: float | None = None,
    max_post_edit_steps: int = 16,
    credit: tuple[float, float, float] | None = None,
) -> Generated:
    """What comes after a prompt, up to and with the first ending token.

    Args:
        credit: alpha, gamma and beta of credits for tokens that were likeliest in rounds before.
    """
    size, mask = model.config.block_size, model.config.mask_token_id
    assert size is not None and mask is not None
    filters = filters or Filters(temperature=0.0)
    ids, first = list(prompt), len(prompt)
    out = Generated([], [], [])
    while True:
        start = len(ids) // size * size
        given = len(ids) - start
        block = np.asarray(ids[start:] + [mask] * (size - given))
        noted, credits = np.zeros(size), np.zeros((size, model.config.vocab_size))
        number = edits = 0
        while True:
            logits = block_logits(model, [*ids[:start], *block.tolist()], start).copy()
            masked = block == mask
            logits[:, mask] = -np.inf
            credited = logits
            if credit is not None:
                alpha, gamma, beta = credit
                credits *= beta
                for place in np.flatnonzero(masked):
                    top = logits[place].argmax()
                    share = 1 / np.exp(logits[place].astype(np.float64) - logits[place, top]).sum()
                    credits[place, top] += share**gamma
                credited = (logits + alpha * np.log1p(credits)).astype(np.float32)
            drawn, confidence = draw(credited, start, number, filters, request_key)
            logprobs = logits[np.arange(size), drawn] - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
            changed = {} if not masked.any() else {place: drawn[place] for place in rule(confidence, masked)}
            if edit_threshold is not None and (masked.any() or edits < max_post_edit_steps):
                for place in range(given, size):
                    if not masked[place] and drawn[place] != block[place] and confidence[place] > edit_threshold:
                        changed[place] = drawn[place]
            number += 1
            if not masked.any() and not changed:
                out.rounds.append((start, tuple(block.tolist())))
                break
            edits += not masked.any()
            for place, token in changed.items():
                block[place], noted[place] = token, logprobs[place]
            out.rounds.append((start, tuple(block.tolist())))
            end = _end_inside(block.tolist(), mask, given, first + num_tokens - 1 - start, eos)
            if edit_threshold is None and end is not None:
                break
        ids = ids[:start] + block.tolist()
        for place in range(given, size):
            out.tokens.append(int(block[place]))
            out.logprobs.append(float(noted[place]))
            if block[place] in eos or len(out.tokens) == num_tokens:
                return out
        assert len(ids) - first < num_tokens


def _end_inside(block: list[int], mask: int, given: int, last: int, eos: Sequence[int]) -> int | None:
    """Where the sequence ends, if that is before the block's last place and everything up to there is known."""
    for place, token in enumerate(block[:-1]):
        if token == mask:
            return None
        if place == last or (place >= given and token in eos):
            return place
    return None


def draw(
    logits: np.ndarray, start: int, number: int, filters: Filters, request_key: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """A token for each place and its probability."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    drawn = np.zeros(len(logits), int)
    words = jnp.arange(logits.shape[1])
    key = np.asarray([request_key[0], (request_key[1] + number * 0x9E3779B9) % 2**32], np.uint32)
    for place, row in enumerate(logits):
        if not filters.temperature:
            drawn[place] = row.argmax()
            continue
        noise = np.asarray(gumbel(jnp.asarray(key), jnp.int32(start + place), words))
        scores = row + np.float32(filters.temperature) * noise
        drawn[place] = np.where(probabilities_of(row, filters) > 0, scores, -np.inf).argmax()
    return drawn, probabilities[np.arange(len(logits)), drawn]
