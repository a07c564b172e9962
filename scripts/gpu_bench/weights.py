"""Weights that are a formula of a tensor's name and an element's index, so that two frameworks have the same ones.

Nothing is written to disk and nothing is sent: either side computes them on its device. Every step is exact integer
arithmetic or one float32 rounding, so the bits agree. This file imports neither JAX nor torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

# An odd multiplier that spreads neighbouring indices, and two of a mixer; each below 2 ** 31, so that 64-bit integers
# hold the products.
_SPREAD, _MIX_1, _MIX_2 = 0x1E3779B1, 0x21F0AAAD, 0x735A2D97
_BITS = 24  # float32 holds integers of so many bits


def salt(name: str) -> int:
    """What tells the tensors of a model apart."""
    return zlib.crc32(name.encode())


def deviation(name: str, shape: tuple[int, ...]) -> float | None:
    """Standard deviation of a tensor by its name in a Hugging Face checkpoint; None: it holds ones (a norm)."""
    if len(shape) == 1:
        return None
    # A small embedding lets the layers' outputs be seen in the residual stream; kernels keep the size of what they map.
    return 0.1 if "embed_tokens" in name else shape[-1] ** -0.5


def factor(name: str, shape: tuple[int, ...]) -> float | None:
    """What `fraction` is multiplied with, in float32: a uniform number's width for the deviation; None for a norm."""
    std = deviation(name, shape)
    return None if std is None else std * 12**0.5


def to_32_bits(x: Any) -> Any:
    """The low 32 bits of int64 numbers."""
    return x & 0xFFFFFFFF


def scrambled(index: Any, salt: Any, wrap: Callable[[Any], Any] = to_32_bits) -> Any:
    """Integers of 24 bits from element indices below 2 ** 32.

    Args:
        index, salt: int64 of NumPy or torch; or uint32 of any framework, whose products wrap around by themselves.
        wrap: brings products back to 32 bits; for uint32 the identity.
    """
    x = wrap(index * _SPREAD + salt)
    x = wrap((x ^ (x >> 16)) * _MIX_1)
    x = wrap((x ^ (x >> 15)) * _MIX_2)
    return (x ^ (x >> 15)) >> (32 - _BITS)


def fraction(bits: Any) -> Any:
    """Numbers in [-0.5, 0.5) from 24-bit integers as float32: exact."""
    return bits * 2.0**-_BITS - 0.5


def prompt_ids(count: int, vocab_size: int) -> np.ndarray:
    """int32 [count], the tokens that both sides are given."""
    return np.random.default_rng(7).integers(0, vocab_size, count).astype(np.int32)
