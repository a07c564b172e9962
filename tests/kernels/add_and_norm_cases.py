"""The case table of the kernel that adds a result to the residual stream and normalises the sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.parts import Parts

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """Random rows; `parts`: of what is added, 0 if it is whole; `zeros`: it is zero, so that the sum is not rounded."""

    tokens: int = 2
    size: int = 1024
    parts: int = 0
    bias: bool = False
    zeros: bool = False
    wide_scale: bool = False  # the norm's scale is float32
    dtype: jnp.dtype = jnp.bfloat16
    slow: bool = False

    @cached_property
    def arguments(self) -> tuple[jax.Array, jax.Array | Parts, jax.Array]:
        """The residual stream, the result and the norm's scale."""
        rng = np.random.default_rng(7)

        def array(*shape: int, dtype: jnp.dtype = self.dtype) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), dtype)

        x = array(self.tokens, self.size)
        scale = array(self.size, dtype=jnp.float32 if self.wide_scale else self.dtype)
        if not self.parts:
            return x, jnp.zeros_like(x) if self.zeros else array(self.tokens, self.size), scale
        values = array(self.parts, self.tokens, self.size, dtype=jnp.float32)
        return x, Parts(values, array(self.size) if self.bias else None, x.dtype), scale


CASES = {
    "whole": Case(),
    "four_parts": Case(parts=4),
    "parts_with_a_bias": Case(parts=2, bias=True),
    "odd_sizes_in_float16": Case(size=896, parts=3, dtype=jnp.float16),
    "a_wide_scale": Case(size=512, zeros=True, wide_scale=True),
    "a_wide_scale_in_float16": Case(size=256, parts=2, bias=True, dtype=jnp.float16, wide_scale=True),
    "a_row_of_no_whole_threads": Case(size=320),
    "a_row_of_2880": Case(size=2880, parts=2, bias=True, wide_scale=True),
    "a_row_of_8192": Case(tokens=1, size=8192, parts=2, slow=True),
    "many_tokens": Case(tokens=20, size=256, parts=8, slow=True),
}
