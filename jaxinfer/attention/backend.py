"""Which code computes attention on this device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax

from jaxinfer.attention import xla
from jaxinfer.attention.metadata import AttentionMetadata

ATTENTION_BACKENDS = ("auto", "xla", "pallas")


class PagedAttention(Protocol):
    def __call__(
        self, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, metadata: AttentionMetadata, /, *, scale: float
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

    "pallas" takes the Mosaic GPU kernel for what it can run and plain XLA for the rest, with a warning that says why.

    Raises:
        ValueError: no such backend.
    """
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend must be one of {', '.join(ATTENTION_BACKENDS)}, got {name!r}")
    if name == "xla" or (name == "auto" and jax.default_backend() != "gpu"):
        return AttentionBackend("xla", xla.paged_attention, xla.write_kv)
    # On a CPU, Pallas for GPUs is not worth the time that its import takes.
    from kernels_pallas.branch_attention.api import branch_attention, why_not_here

    if name == "auto" and why_not_here() is not None:
        return AttentionBackend("xla", xla.paged_attention, xla.write_kv)
    return AttentionBackend("pallas", partial(branch_attention, reference=xla.paged_attention), xla.write_kv)
