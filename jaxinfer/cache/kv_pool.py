"""The KV pool: one array per layer for keys and one for values, allocated once and updated in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """Keys and values of all slots. Steps take it as a donated argument and return it: the same memory, updated."""

    # Of each layer that has keys and values of its own.
    k: tuple[jax.Array, ...]  # per layer [num_pages, page_size, num_kv_heads, head_dim]
    v: tuple[jax.Array, ...]  # per layer [num_pages, page_size, num_kv_heads, head_dim]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        sharding: jax.sharding.Sharding | None = None,
    ) -> KVPool:
        """Allocate a zeroed pool of `num_pages` pages of `page_size` slots; `sharding` None: on the default device."""
        shapes = [(num_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in config.kv_layers]
        arrays = [jnp.zeros(shape, dtype, device=sharding) for shape in shapes for _ in range(2)]
        return cls(k=tuple(arrays[::2]), v=tuple(arrays[1::2]))

    @classmethod
    def shapes(
        cls,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        sharding: jax.sharding.Sharding | None = None,
    ) -> KVPool:
        """Return a pool that consists of shapes only, to compile for."""
        shapes = [(num_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in config.kv_layers]
        pages: Any = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes)
        return cls(k=pages, v=pages)

    @property
    def is_abstract(self) -> bool:
        """Whether the pool consists of shapes only."""
        return isinstance(self.k[0], jax.ShapeDtypeStruct)

    @property
    def num_pages(self) -> int:
        return self.k[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.k[0].shape[1]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, over all devices."""
        return sum(array.nbytes for array in (*self.k, *self.v))


def kv_bytes_per_token(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Return the bytes that one slot takes in all layers."""
    elements = sum(layer.num_kv_heads * layer.head_dim for layer in config.kv_layers)
    return 2 * elements * jnp.dtype(dtype).itemsize


def __getattr__(name: str) -> Any:
    if name == "KVCache":  # the former name, which a class of the textbook has now
        return KVPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
