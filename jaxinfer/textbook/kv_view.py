"""One sequence's KV under the interface of SpecSoT's `KVCache`: append, copy, truncate, read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.programs.commit_tail import commit_tail
from kernels_pallas.rotate_and_write.reference import write_kv


class KVCache:
    """A view of one lane of the engine's pool (`jaxinfer.cache.kv_pool.KVPool`), with a length.

    SpecSoT's own class, a tensor of one layer of its own, is `jaxinfer.textbook.branching.KVCache`.

    It owns no memory: it writes to the lane's pages, in all layers. Each operation that writes donates the pool, so it
    is updated in place, and the old object is used up. Take the pool from `pool`, and assign it there after other
    programs have written to it.

    Every number of tokens that is appended, copied or read compiles a program of its own, so this is for tests and
    scripts. The engine moves KV in batches of fixed shapes.
    """

    def __init__(self, pool: KVPool, pages: Sequence[int], length: int = 0) -> None:
        """View the lane that consists of `pages`.

        Args:
            pages: in the order of the lane; their slots are its capacity.
            length: tokens that the lane holds already.

        Raises:
            TypeError: `pool` is no KVPool.
            ValueError: a page is not one of the pool's or occurs twice; or the lane is shorter than `length`.
        """
        if not isinstance(pool, KVPool):
            raise TypeError(
                f"pool: {pool!r}, allowed is a KVPool, of which this class is a view; "
                "KVCache(shape, device, dtype) is jaxinfer.textbook.branching.KVCache"
            )
        table = np.asarray(pages, np.int32)
        outside = table[(table < 0) | (table >= pool.num_pages)]
        if outside.size or len(set(table.tolist())) < len(table):
            raise ValueError(f"pages: {list(pages)}, allowed are distinct ones of the pool's {pool.num_pages}")
        self.pool: KVPool = pool
        self._slots = (table[:, None] * pool.page_size + np.arange(pool.page_size, dtype=np.int32)).reshape(-1)
        if not 0 <= length <= self.capacity:
            raise ValueError(f"length: {length}, allowed are 0 to {self.capacity}")
        self._length = length

    @property
    def current_length(self) -> int:
        """Tokens that the lane holds."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens that the lane has room for."""
        return len(self._slots)

    def append(self, k: Sequence[jax.Array], v: Sequence[jax.Array]) -> None:
        """Write the keys and values of N tokens after the lane's last one.

        Args:
            k, v: of each layer, [N, num_kv_heads, head_dim].

        Raises:
            ValueError: they do not have the pool's shape, or do not fit.
        """
        count = len(k[0])
        expected = [(count, *pages.shape[2:]) for pages in (*self.pool.k, *self.pool.v)]
        if [new.shape for new in (*k, *v)] != expected:
            raise ValueError(f"k, v: {[new.shape for new in (*k, *v)]}, allowed are {expected}")
        end = self._end(self._length, count)
        if count:
            self.pool = _write(self.pool, tuple(k), tuple(v), self._slots[self._length : end])
        self._length = end

    def copy(self, src_indices: Sequence[int] | np.ndarray, dst_start: int) -> None:
        """Move tokens to the lane indices from `dst_start` on; the lane then ends after the last of them.

        Verification does this: drafts follow `dst_start`, the accepted ones close up, and the rest is dropped.
        SpecSoT's own `copy` leaves the length to a later `truncate`. All tokens are read before any is written, so that
        sources and destinations may overlap in any way.

        Args:
            src_indices: int [N], lane indices of tokens, in their new order.

        Raises:
            ValueError: a source holds no token, there is a gap between the lane's tokens and `dst_start`, or no room.
        """
        source = np.asarray(src_indices, np.int32)
        if source.size and not 0 <= source.min() <= source.max() < self._length:
            raise ValueError(f"src_indices: {source.tolist()}, allowed are 0 to {self._length - 1}")
        if not 0 <= dst_start <= self._length:
            raise ValueError(f"dst_start: {dst_start}, allowed are 0 to {self._length}")
        end = self._end(dst_start, len(source))
        if source.size:
            self.pool = _move(self.pool, self._slots[source][None], self._slots[dst_start:end][None])
        self._length = end

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on. Nothing is written, and no page is freed.

        Raises:
            ValueError: the lane does not hold so many tokens.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"length: {length}, allowed are 0 to {self._length}")
        self._length = length

    def get_valid(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the keys and values of the lane's tokens: for each layer, [current_length, num_kv_heads, head_dim].

        They are a copy, because a lane's pages are not contiguous and a JAX array cannot be a view of another. Programs
        of the engine copy nothing: their attention reads the pages in place.
        """
        return _read(self.pool, self._slots[: self._length])

    def _end(self, start: int, count: int) -> int:
        if start + count > self.capacity:
            raise ValueError(f"{count} tokens from lane index {start} on do not fit into a lane of {self.capacity}")
        return start + count


type Layers = tuple[jax.Array, ...]


@partial(jax.jit, donate_argnums=0)
def _write(pool: KVPool, k: Layers, v: Layers, slots: jax.Array) -> KVPool:
    """Write keys and values [N, num_kv_heads, head_dim] of each layer to slots int32 [N] of the pool."""

    def written(layers: Layers, new: Layers) -> Layers:
        return tuple(write_kv(pages, tokens, slots) for pages, tokens in zip(layers, new, strict=True))

    return KVPool(k=written(pool.k, k), v=written(pool.v, v))


_move = jax.jit(commit_tail, donate_argnums=0)


@jax.jit
def _read(pool: KVPool, slots: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the keys and values of each layer at slots int32 [N]."""

    def found(layers: Layers) -> list[jax.Array]:
        return [pages.reshape(-1, *pages.shape[2:]).at[slots].get(mode="promise_in_bounds") for pages in layers]

    return found(pool.k), found(pool.v)
