"""Bounds of the draws of running sequences, by seat: penalties, biases, sets of allowed tokens, and masks.

A mask is the set of tokens that a constraint allows next. It binds one draw, the next of its sequence: a token that it
does not allow is drawn again among those that it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.limits import MAX_LOGIT_BIAS

WORD_BITS = 32
_MOST = np.iinfo(np.uint16).max


def num_words(vocab: int) -> int:
    """Return the number of words of bits, one bit for each token."""
    return -(-vocab // WORD_BITS)


class BoundsPlace(NamedTuple):
    """Shardings of bounds: replicated, but for counts, which are split by words as logits are. None: on the default
    device."""

    whole: jax.sharding.Sharding | None = None
    by_word: jax.sharding.Sharding | None = None


ON_DEFAULT_DEVICE = BoundsPlace()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bounds:
    """One entry for each of S sequences that may run at once. V tokens, W words of bits, K = MAX_LOGIT_BIAS.

    The counts of a sequence are those of its output tokens but the latest, which is not computed yet and is added when
    a token is drawn after it. Where `binds` is 0, all other fields but the mask are meaningless.
    """

    binds: Any  # int32 [S], 1: anything here but a mask changes draws of the sequence
    masked_at: Any  # int32 [S], the index in its sequence of the one token whose draw has a mask; 0: none
    masks_list: Any  # int32 [S], 1: so has the list of likely tokens
    mask: Any  # uint32 [S, W], bits
    counts: Any  # uint16 [S, V], how often each token is in the output; the greatest uint16 also stands for more
    in_prompt: Any  # uint32 [S, W], bits
    allowed: Any  # uint32 [S, W], bits
    ending: Any  # uint32 [S, W], bits: tokens that are barred below `min_length`
    min_length: Any  # int32 [S], tokens of the sequence before which none of `ending` may be drawn
    prompt_length: Any  # int32 [S]
    bias_token: Any  # int32 [S, K]; V: none
    bias: Any  # float32 [S, K]
    repetition_penalty: Any  # float32 [S], 1 is off
    frequency_penalty: Any  # float32 [S], 0 is off
    presence_penalty: Any  # float32 [S], 0 is off
    # Sharding of logits [..., V], and of counts like them; None: they are not sharded.
    by_word: jax.sharding.Sharding | None = field(default=None, metadata={"static": True})

    @classmethod
    def allocate(cls, num_seats: int, vocab: int, place: BoundsPlace = ON_DEFAULT_DEVICE) -> Bounds:
        """Return the bounds of empty seats: they bind nothing."""
        return cls._made(num_seats, vocab, place, lambda extent, dtype, at: jnp.zeros(extent, dtype, device=at))

    @classmethod
    def shapes(cls, num_seats: int, vocab: int, place: BoundsPlace = ON_DEFAULT_DEVICE) -> Bounds:
        """Return bounds of shapes only: to compile for, not to run with."""
        return cls._made(
            num_seats, vocab, place, lambda extent, dtype, at: jax.ShapeDtypeStruct(extent, dtype, sharding=at)
        )

    @classmethod
    def _made(cls, num_seats: int, vocab: int, place: BoundsPlace, make: Callable[..., Any]) -> Bounds:
        layout = cls.layout(num_seats, vocab)
        return cls(
            **{
                name: make(*of_one, place.by_word if name == "counts" else place.whole)
                for name, of_one in layout.items()
            },
            by_word=place.by_word,
        )

    @classmethod
    def bytes_of(cls, num_seats: int, vocab: int, num_devices: int = 1) -> int:
        """Return the bytes of bounds on each of `num_devices` devices."""
        each = {
            name: math.prod(of) * np.dtype(dtype).itemsize for name, (of, dtype) in cls.layout(num_seats, vocab).items()
        }
        if vocab % num_devices == 0:
            each["counts"] //= num_devices
        return sum(each.values())

    @classmethod
    def layout(cls, num_seats: int, vocab: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return name -> (shape, dtype) of every array."""
        words, i, f, bits = num_words(vocab), np.int32, np.float32, np.uint32
        extents: dict[str, tuple[tuple[int, ...], Any]] = {
            "counts": ((vocab,), np.uint16), "in_prompt": ((words,), bits), "allowed": ((words,), bits),
            "ending": ((words,), bits), "mask": ((words,), bits),
            "bias_token": ((MAX_LOGIT_BIAS,), i), "bias": ((MAX_LOGIT_BIAS,), f),
            "repetition_penalty": ((), f), "frequency_penalty": ((), f), "presence_penalty": ((), f),
        }  # fmt: skip
        named = {each.name: extents.get(each.name, ((), i)) for each in fields(cls) if each.name != "by_word"}
        return {name: ((num_seats, *extent), dtype) for name, (extent, dtype) in named.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bounded:
    """Draws of Q tokens, and the bounds by seat that apply to them, while a program is traced."""

    bounds: Bounds
    seat: jax.Array  # int32 [Q], out of range: nothing applies
    position: jax.Array  # int32 [Q], the index in its sequence of the token that is drawn
    path: jax.Array  # int32 [Q, D], output tokens before it that are not counted: the latest, and drafts; -1: none

    @property
    def anyone(self) -> jax.Array:
        return jnp.any(of_seats(self.bounds.binds, self.seat) > 0)

    def hold(self, logits: jax.Array) -> jax.Array:
        """Return logits float32 [Q, V] as they are drawn from; nothing is computed if no row is bound."""
        # As in `as_held`.
        return self.split(lax.cond(self.anyone, self.adjusted, lambda logits: logits, self.split(logits)))

    def adjusted(self, logits: jax.Array) -> jax.Array:
        """Return what `hold` does, if at least one row is bound."""
        of_draws = of_rows(self.bounds, self.seat)
        held = adjust(logits, of_draws, self.position, self.path)
        return jnp.where(of_draws.binds[:, None] > 0, held, logits)

    @property
    def are_masked(self) -> jax.Array:
        """bool [Q]: draws that have a mask."""
        return (self.position > 0) & (of_seats(self.bounds.masked_at, self.seat) == self.position)

    def refused(self, tokens: jax.Array) -> jax.Array:
        """Return which of the drawn tokens int32 [Q] their sequences' masks do not allow, as bool [Q]."""
        word = self.bounds.mask.at[self.seat, tokens // WORD_BITS].get(mode="clip")
        is_allowed = (word >> (tokens % WORD_BITS).astype(jnp.uint32)) & 1 > 0
        return self.are_masked & (tokens >= 0) & ~is_allowed

    def within_masks(self, logits: jax.Array) -> jax.Array:
        """Return logits float32 [Q, V], -inf for tokens that the mask of a sequence does not allow."""
        allowed = unpacked(self.bounds.mask.at[self.seat].get(mode="clip"), logits.shape[-1])
        return self.split(jnp.where(self.are_masked[:, None] & ~allowed, -jnp.inf, logits))

    def listed(self, logits: jax.Array) -> jax.Array:
        """Return logits float32 [Q, V], -inf for tokens that the list of a sequence's likely tokens leaves out."""
        has_list = self.are_masked & (of_seats(self.bounds.masks_list, self.seat) > 0)

        def masked(logits: jax.Array) -> jax.Array:
            allowed = unpacked(self.bounds.mask.at[self.seat].get(mode="clip"), logits.shape[-1])
            return jnp.where(has_list[:, None] & ~allowed, -jnp.inf, logits)

        # Without a sharding constraint, XLA replicates on every device what passes through a condition.
        return self.split(lax.cond(jnp.any(has_list), masked, lambda logits: logits, self.split(logits)))

    def split(self, logits: jax.Array) -> jax.Array:
        """Return logits float32 [Q, V] with their sharding: split by word, or as they are."""
        return split_by_word(logits, self.bounds)


def split_by_word(logits: jax.Array, bounds: Bounds) -> jax.Array:
    """Return logits float32 [Q, V] split by word over the mesh that bounds know of, or as they are."""
    return logits if bounds.by_word is None else lax.with_sharding_constraint(logits, bounds.by_word)


def unpacked(bits: jax.Array, vocab: int) -> jax.Array:
    """Return bits uint32 [N, W] as bool [N, vocab]."""
    token = jnp.arange(vocab, dtype=jnp.uint32)
    words = jnp.take(bits, (token // WORD_BITS).astype(jnp.int32), axis=1, mode="clip")
    return (words >> (token % WORD_BITS)) & 1 > 0


def _has(bits: jax.Array, token: jax.Array) -> jax.Array:
    """Return whether tokens int32 [N, D] are in the sets of bits uint32 [N, W], as bool [N, D]."""
    words = jnp.take_along_axis(bits, token // WORD_BITS, axis=1, mode="clip")
    return (words >> (token % WORD_BITS).astype(jnp.uint32)) & 1 > 0


def adjust(logits: jax.Array, bounds: Bounds, position: jax.Array, path: jax.Array) -> jax.Array:
    """Return logits float32 [N, V] as they are drawn from, with bounds applied in vLLM's order.

    Sets and biases; then the repetition penalty (Keskar et al. 2019: positive logits of tokens in the prompt or the
    output are divided by it, negative ones multiplied), the frequency penalty (times the count in the output) and the
    presence penalty (once if the count is not 0), both as in OpenAI's documentation.

    Args:
        bounds: of the N rows.
        position: int32 [N], the index in its sequence of the token that is drawn.
        path: int32 [N, D], output tokens before it that are not counted: the latest, and drafts; -1: none.
    """
    vocab = logits.shape[-1]
    is_barred = ~unpacked(bounds.allowed, vocab)
    is_barred |= (position < bounds.min_length)[:, None] & unpacked(bounds.ending, vocab)
    logits = jnp.where(is_barred, -jnp.inf, logits)
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, bounds.bias_token].add(bounds.bias, mode="drop")
    known = unpacked(bounds.in_prompt, vocab)
    out = _penalized(logits, bounds.counts.astype(jnp.float32), known, bounds)
    # Penalties do not add up token by token: for tokens on the path, they are computed from the whole count.
    token = jnp.maximum(path, 0)
    on_path = jnp.sum((path[:, :, None] == path[:, None]) & (path >= 0)[:, None], axis=2)
    count = on_path + jnp.take_along_axis(bounds.counts, token, axis=1).astype(jnp.int32)
    anew = _penalized(
        jnp.take_along_axis(logits, token, axis=1), count.astype(jnp.float32), _has(bounds.in_prompt, token), bounds
    )
    return out.at[rows, jnp.where(path >= 0, path, vocab)].set(anew, mode="drop")


def _penalized(logits: jax.Array, count: jax.Array, in_prompt: jax.Array, bounds: Bounds) -> jax.Array:
    """Return logits with penalties, given counts float32 and marks of the prompt, all [N, ...]."""
    penalty = jnp.where(in_prompt | (count > 0), bounds.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = logits - bounds.frequency_penalty[:, None] * count
    return logits - jnp.where(count > 0, bounds.presence_penalty[:, None], 0.0)


def packed_bits(mask: np.ndarray) -> np.ndarray:
    """Return the bits uint32 [W] of a set of tokens, bool [V], on the host."""
    packed = np.zeros(num_words(mask.size) * WORD_BITS // 8, np.uint8)
    of_mask = np.packbits(mask, bitorder="little")
    packed[: of_mask.size] = of_mask
    return packed.view(np.dtype("<u4")).astype(np.uint32, copy=False)


def of_seats(by_seat: jax.Array, seat: jax.Array) -> jax.Array:
    """Return the integers [N] of seats int32 [N]; 0 for a seat out of range."""
    is_one = (seat >= 0) & (seat < by_seat.shape[0])
    return jnp.where(is_one, by_seat.at[seat].get(mode="clip"), 0)


def of_rows(bounds: Bounds, seat: jax.Array) -> Bounds:
    """Return the bounds of seats int32 [N]; a seat out of range has arbitrary ones, which do not bind."""
    found = jax.tree.map(lambda x: x.at[seat].get(mode="clip"), bounds)
    return replace(found, binds=of_seats(bounds.binds, seat))


def latest_output(bounds: Bounds, seat: jax.Array, token: jax.Array, position: jax.Array) -> jax.Array:
    """Return the latest tokens int32 [N] of sequences, at positions [N], as the start of a path: -1 for a token of the
    prompt."""
    return jnp.where(position >= of_seats(bounds.prompt_length, seat), token, -1)


def counted(bounds: Bounds, seat: jax.Array, position: jax.Array, tokens: jax.Array) -> Bounds:
    """Return the bounds after tokens int32 [N, D] of N sequences have become tokens before the latest.

    Args:
        seat: int32 [N], out of range: nothing is counted.
        position: int32 [N, D], of the tokens in their sequences; those of the prompt are not counted.
        tokens: -1: none.
    """
    before = bounds.counts
    counts = (of_seats(bounds.binds, seat) > 0)[:, None] & (tokens >= 0)
    counts &= position >= of_seats(bounds.prompt_length, seat)[:, None]
    number = jnp.sum((tokens[:, :, None] == tokens[:, None]) & counts[:, None], axis=2)
    known = before.at[jnp.maximum(seat, 0)[:, None], jnp.maximum(tokens, 0)].get(mode="clip").astype(jnp.int32)
    at = jnp.where(counts, seat[:, None], before.shape[0])
    # Not in a `lax.cond`: in a loop, XLA would copy all counts for it.
    after = jnp.minimum(known + number, _MOST).astype(before.dtype)
    return replace(bounds, counts=before.at[at, tokens].set(after, mode="drop"))
