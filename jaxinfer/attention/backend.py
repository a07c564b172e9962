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
    """The backend called `name`; "auto" is the best one for the device that is compiled for.

    "pallas" takes the Mosaic GPU kernel for what it can run and plain XLA for the rest, with a warning that says why.

    Raises:
        ValueError: no such backend.
    """
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend must be one of {', '.join(ATTENTION_BACKENDS)}, got {name!r}")
    if name == "xla" or (name == "auto" and _platform() != "gpu"):
        return AttentionBackend("xla", xla.paged_attention, xla.write_kv)
    # On a CPU, Pallas for GPUs is not worth the time that its import takes.
    from kernels_pallas.branch_attention.api import branch_attention, why_not_here

    if name == "auto" and why_not_here() is not None:
        return AttentionBackend("xla", xla.paged_attention, xla.write_kv)
    attention = partial(branch_attention, reference=xla.paged_attention)
    # Jitted by itself, it is traced, lowered and compiled once for all layers of a step.
    return AttentionBackend("pallas", jax.jit(attention, static_argnames="scale"), xla.write_kv)


def _platform() -> str:
    """Of the device that is compiled for, which need not be here."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if target is None else target.platform
