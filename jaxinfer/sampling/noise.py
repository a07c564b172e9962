"""The engine's random numbers: for every (key, position, token) one Gumbel number, wherever it is computed.

The generator is counter-based: Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"), which is also JAX's own. Its key is the request's, its counter (position, token), and the number is made of
the first of its two output words. So a token's number is the same whether it is computed alone, among candidates or
with the whole vocabulary, and every device can compute those of its own part of a vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_ROUNDS = 20
_KEY_PARITY = 0x1BD11BDA
# The greatest float32 below 1: a number of probability 1 would be infinite.
_BELOW_ONE = np.float32(1 - 2**-24)


def random_bits(request_key: jax.Array, position: jax.Array, token: jax.Array) -> jax.Array:
    """Return uint32 [...]: the first word of Threefry-2x32 for each counter (position, token).

    Args:
        request_key: uint32 [..., 2].
        position, token: integers [...] of at most 32 bits; they broadcast with each other and with the keys' [...].
    """
    first, second = request_key[..., 0].astype(jnp.uint32), request_key[..., 1].astype(jnp.uint32)
    schedule = (first, second, first ^ second ^ np.uint32(_KEY_PARITY))
    x, y = position.astype(jnp.uint32) + first, token.astype(jnp.uint32) + second
    for index in range(_ROUNDS):
        x = x + y
        y = _rotated(y, _ROTATIONS[index // 4 % 2][index % 4]) ^ x
        if index % 4 == 3:
            turn = index // 4 + 1
            x = x + schedule[turn % 3]
            y = y + schedule[(turn + 1) % 3] + np.uint32(turn)
    return x


def gumbel(request_key: jax.Array, position: jax.Array, token: jax.Array) -> jax.Array:
    """Return float32 [...]: standard Gumbel numbers. All 32 random bits count in the upper tail, which decides.

    With a probability p in (0, 1) of 32 bits, -log(1 - p) is exponentially distributed and -log of that a Gumbel
    number. Small p, exact down to 2^-33, give the great numbers (up to 22.9); p near 1 is rounded to 24 bits, so no
    number is below -2.9.

    Args: as for `random_bits`.
    """
    bits = random_bits(request_key, position, token)
    probability = jnp.minimum((bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-32), _BELOW_ONE)
    return -jnp.log(-jnp.log1p(-probability))


def _rotated(word: jax.Array, by: int) -> jax.Array:
    return (word << np.uint32(by)) | (word >> np.uint32(32 - by))
