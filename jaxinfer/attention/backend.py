"""Which code computes attention on this device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from jaxinfer.attention import xla
from jaxinfer.attention.metadata import AttentionMetadata

ATTENTION_BACKENDS = ("auto", "xla")


class PagedAttention(Protocol):
    def __call__(
        self, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, metadata: AttentionMetadata, *, scale: float
    ) -> jax.Array: ...


class WriteKV(Protocol):
    def __call__(self, pages: jax.Array, new: jax.Array, slot_mapping: jax.Array) -> jax.Array: ...


@dataclass(frozen=True)
class AttentionBackend:
    """A way to write K and V into the pool and to attend over it."""

    name: str
    attention: PagedAttention
    write_kv: WriteKV


def select_backend(name: str = "auto") -> AttentionBackend:
    """The backend called `name`; "auto" is the best one for this device.

    Raises:
        ValueError: no such backend.
    """
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend must be one of {', '.join(ATTENTION_BACKENDS)}, got {name!r}")
    return AttentionBackend("xla", xla.paged_attention, xla.write_kv)
