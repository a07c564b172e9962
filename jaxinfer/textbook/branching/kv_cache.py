"""KV caches of fixed size with a length, as SpecSoT draws them: one tensor, or the tensors of all layers of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.textbook.devices import Array, Device, device_of

# The engine's log of memory: a line at DEBUG for every operation, as SpecSoT's list of risks asks for.
logger = logging.getLogger("jaxinfer.memory")


class KVCache:
    """Keys or values of one layer, [batch, heads, capacity, head_dim], allocated once.

    JAX arrays do not change. Each operation that writes gives the old array to a compiled program that may reuse its
    memory, so the data are updated in place, and an array that was read from `data` before is used up. A program is
    compiled for every number of tokens that is appended or copied.

    The engine has no such tensor for a sequence, because it must reserve the longest length for each. It has one pool
    of pages for all sequences (`jaxinfer.cache.kv_pool.KVPool`); `jaxinfer.textbook.kv_view.KVCache` shows a lane of it
    through these operations.

    Attributes:
        data: the whole array, with what was truncated or never written.
        current_length: tokens that are valid, the first ones of each row.
        capacity: tokens that a row has room for.
    """

    def __init__(self, shape: Sequence[int], device: Device = None, dtype: Any = jnp.float32) -> None:
        """Allocate zeros.

        Args:
            shape: batch, heads, capacity and head_dim.
            device: a jax.Device or a name such as "cpu" or "cuda:0"; None: JAX's default device.
            dtype: of the data.

        Raises:
            ValueError: `shape` has not four sizes of at least 1, or there is no such device.
        """
        sizes = tuple(shape)
        if len(sizes) != 4 or not all(isinstance(size, (int, np.integer)) and size >= 1 for size in sizes):
            raise ValueError(f"shape: {shape}, allowed are (batch, heads, capacity, head_dim), each of at least 1")
        self.data: jax.Array = jnp.zeros(sizes, dtype, device=None if device is None else device_of(device))
        self.current_length = 0
        logger.debug("KVCache: allocate %d bytes, capacity %d", self.data.nbytes, self.capacity)

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return self.data.shape[2]

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.data.shape[0]

    def append(self, new_kv: jax.Array) -> None:
        """Write tokens after the valid ones.

        Args:
            new_kv: [batch, heads, N, head_dim]; rounded to the cache's dtype.

        Raises:
            ValueError: it has another shape, or does not fit.
        """
        batch, heads, capacity, dim = self.data.shape
        shape = jnp.shape(new_kv)
        if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (batch, heads, dim):
            raise ValueError(f"new_kv: {shape}, allowed are shapes ({batch}, {heads}, N, {dim})")
        end = self.current_length + shape[2]
        if end > capacity:
            raise ValueError(f"new_kv: {shape[2]} tokens after {self.current_length}, the capacity is {capacity}")
        if shape[2]:
            self.data = _write(self.data, new_kv, self.current_length)
        logger.debug("KVCache: append %d tokens at %d", shape[2], self.current_length)
        self.current_length = end

    def cat(self, new_kv: jax.Array, dim: int = 2) -> jax.Array:
        """Append tokens and return all valid ones, as attention layers of SpecSoT's models do in one call.

        Raises:
            ValueError: `dim` is not 2, the axis of tokens; or as `append`.
        """
        if dim != 2:
            raise ValueError(f"dim: {dim}, allowed is 2, the axis of tokens")
        self.append(new_kv)
        return self.get_valid()

    def copy(self, src_indices: Sequence[int] | Array, dst_start: int) -> None:
        """Move tokens to the indices from `dst_start` on, in every row; `current_length` stays as it is.

        So do SpecSoT's own caches, and `truncate` after it ends the sequence after the moved tokens. (The `copy` of
        `jaxinfer.textbook.kv_view.KVCache` does both.) All tokens are read before any is written: sources and
        destinations may overlap.

        Args:
            src_indices: int [N].

        Raises:
            ValueError: a source is not a valid token, or a destination is not in the cache.
        """
        source = np.asarray(src_indices, np.int32).reshape(-1)
        if source.size and not 0 <= source.min() <= source.max() < self.current_length:
            raise ValueError(f"src_indices: {source.tolist()}, allowed are 0 to {self.current_length - 1}")
        if not 0 <= dst_start <= self.capacity - source.size:
            raise ValueError(f"dst_start: {dst_start}, allowed are 0 to {self.capacity - source.size}")
        if source.size:
            self.data = _move(self.data, source, dst_start)
        logger.debug("KVCache: copy %d tokens to %d", source.size, dst_start)

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on. Nothing is written, and no memory is freed.

        Raises:
            ValueError: there are not so many.
        """
        if not 0 <= length <= self.current_length:
            raise ValueError(f"length: {length}, allowed are 0 to {self.current_length}")
        logger.debug("KVCache: truncate %d tokens to %d", self.current_length, length)
        self.current_length = length

    def get_valid(self) -> jax.Array:
        """Return the valid tokens, [batch, heads, current_length, head_dim].

        They are a copy, because one JAX array cannot be a view of another. Programs copy nothing: they take `data`
        and mask the rest.
        """
        return self.data[:, :, : self.current_length]

    def written(self, data: jax.Array, length: int) -> None:
        """Take the array back from a program that has used up `data`, with `length` valid tokens.

        Raises:
            ValueError: it is not of this cache's shape and dtype, or `length` is not within the capacity.
        """
        if (data.shape, data.dtype) != (self.data.shape, self.data.dtype):
            wanted = f"{self.data.dtype}{list(self.data.shape)}"
            raise ValueError(f"data: {data.dtype}{list(data.shape)}, allowed is {wanted}")
        if not 0 <= length <= self.capacity:
            raise ValueError(f"length: {length}, allowed are 0 to {self.capacity}")
        self.data, self.current_length = data, length

    def repeated(self, batch_size: int, capacity: int) -> KVCache:
        """Return a new cache whose rows each hold a copy of this one's only row: SpecSoT's batching mode needs it.

        Raises:
            ValueError: this cache has several rows, or more tokens than `capacity`.
        """
        if self.batch_size != 1:
            raise ValueError(f"batch_size of what is repeated: {self.batch_size}, allowed is 1")
        if capacity < self.current_length:
            raise ValueError(f"capacity: {capacity}, allowed are at least the {self.current_length} tokens to copy")
        slots = np.broadcast_to(np.arange(self.current_length), (batch_size, self.current_length))
        return self.gathered(np.zeros_like(slots), slots, capacity)

    def gathered(self, rows: np.ndarray, slots: np.ndarray, capacity: int) -> KVCache:
        """Return a new cache, with the token of row `rows[b, i]` and index `slots[b, i]` at index i of row b.

        Args:
            rows, slots: int [B, N]; negative: nothing is there, zeros are written.
            capacity: of the new cache, at least N.
        """
        batch, count = np.shape(rows)
        heads, dim = self.data.shape[1], self.data.shape[3]
        (device,) = self.data.devices()
        cache = KVCache((batch, heads, capacity, dim), device, self.data.dtype)
        cache.append(_gather(self.data, np.asarray(rows, np.int32), np.asarray(slots, np.int32)))
        logger.debug("KVCache: copy %d tokens into each of %d new rows", count, batch)
        return cache


class ModelKVCache:
    """Keys and values of all layers of a model, each a `KVCache`, all with one length."""

    def __init__(self, layers: Sequence[tuple[KVCache, KVCache]]) -> None:
        """Take the keys and the values of every layer."""
        self.layers = tuple(layers)

    @classmethod
    def allocate(
        cls, config: ModelConfig, capacity: int, *, batch_size: int = 1, device: Device = None, dtype: Any = jnp.float32
    ) -> ModelKVCache:
        """Allocate zeros for `batch_size` sequences of up to `capacity` tokens."""
        shape = (batch_size, config.num_kv_heads, capacity, config.head_dim)

        def one() -> KVCache:
            return KVCache(shape, device, dtype)

        return cls([(one(), one()) for _ in range(config.num_layers)])

    @property
    def current_length(self) -> int:
        """Tokens that are valid in every layer."""
        return self.layers[0][0].current_length

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return self.layers[0][0].capacity

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.layers[0][0].batch_size

    @property
    def data(self) -> list[tuple[jax.Array, jax.Array]]:
        """Arrays of the keys and values of every layer, for a program."""
        return [(k.data, v.data) for k, v in self.layers]

    def copy(self, src_indices: Sequence[int] | Array, dst_start: int) -> None:
        """Move tokens in every layer, see `KVCache.copy`."""
        for cache in self._all():
            cache.copy(src_indices, dst_start)

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on in every layer, see `KVCache.truncate`."""
        for cache in self._all():
            cache.truncate(length)

    def written(self, data: Sequence[tuple[jax.Array, jax.Array]], length: int) -> None:
        """Take the arrays back from a program that has used up `data`, see `KVCache.written`."""
        for caches, arrays in zip(self.layers, data, strict=True):
            for cache, array in zip(caches, arrays, strict=True):
                cache.written(array, length)

    def repeated(self, batch_size: int, capacity: int) -> ModelKVCache:
        """Return new caches, each of whose rows is a copy of the only row, see `KVCache.repeated`."""
        return ModelKVCache(
            [(k.repeated(batch_size, capacity), v.repeated(batch_size, capacity)) for k, v in self.layers]
        )

    def gathered(self, rows: np.ndarray, slots: np.ndarray, capacity: int) -> ModelKVCache:
        """Return new caches with tokens of these, see `KVCache.gathered`."""
        return ModelKVCache(
            [(k.gathered(rows, slots, capacity), v.gathered(rows, slots, capacity)) for k, v in self.layers]
        )

    def _all(self) -> Iterator[KVCache]:
        for layer in self.layers:
            yield from layer


def check_prefix_cache(cache: KVCache | ModelKVCache, prefix_len: int, capacity: int) -> None:
    """Raise ValueError unless a cache is one row of `prefix_len` tokens that has room for `capacity`."""
    if (cache.batch_size, cache.current_length) != (1, prefix_len):
        raise ValueError(
            f"prefix_cache: {cache.current_length} tokens in {cache.batch_size} rows, allowed are {prefix_len} in one"
        )
    if cache.capacity < capacity:
        raise ValueError(f"prefix_cache: room for {cache.capacity} tokens, allowed are at least {capacity}")


@partial(jax.jit, donate_argnums=0)
def _write(data: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(data, new.astype(data.dtype), start, axis=2)


@partial(jax.jit, donate_argnums=0)
def _move(data: jax.Array, source: jax.Array, start: jax.Array) -> jax.Array:
    moved = data.at[:, :, source].get(mode="promise_in_bounds")
    return jax.lax.dynamic_update_slice_in_dim(data, moved, start, axis=2)


@jax.jit
def _gather(data: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Return [B, heads, N, head_dim] of tokens int32 [B, N]; zeros where a row is negative."""
    # Indexed axes that are apart come first: [B, N, heads, head_dim].
    found = data[jnp.maximum(rows, 0), :, jnp.maximum(slots, 0)]
    return jnp.moveaxis(jnp.where((rows >= 0)[..., None, None], found, 0), 1, 2)
