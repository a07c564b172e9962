"""Selection of the code that computes attention on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax

from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.attention.metadata import AttentionMetadata
from jaxinfer.attention.residual import FEATURES_FIRST, PLAIN, Residual
from kernels_pallas.branch_attention.blocks import AttentionSizes
from kernels_pallas.branch_attention.reference import paged_attention, plan_paged_attention
from kernels_pallas.parts import choose_parts
from kernels_pallas.rotate_and_write.reference import rotate_and_write

ATTENTION_BACKENDS = ("auto", "xla", "pallas")


class AttentionPlan(Protocol):
    def __call__(self, metadata: AttentionMetadata, sizes: AttentionSizes, /) -> Any: ...


class PagedAttention(Protocol):
    def __call__(
        self,
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        plan: Any,
        /,
        *,
        scale: float,
        cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array: ...


class RotateAndWrite(Protocol):
    def __call__(
        self, heads: ProjectedHeads, k_pages: jax.Array, v_pages: jax.Array, slot_mapping: jax.Array, /
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@dataclass(frozen=True)
class AttentionBackend:
    """A way to write K and V into the pool and to attend over it.

    `plan` runs once per step and returns a pytree that `attention` reads in every layer beside queries and pages; its
    static parts say which code runs. `rotate_and_write` turns a layer's projected heads into queries and writes their
    keys and values; it returns the queries and pages that `attention` takes. `residual` maps the number of tokens of a
    step to the layout of activations and the way in which results join the residual stream. A step of fewer than
    `min_tokens` tokens is padded.
    """

    name: str
    plan: AttentionPlan
    attention: PagedAttention
    rotate_and_write: RotateAndWrite
    residual: Callable[[int], Residual] = lambda tokens: PLAIN
    min_tokens: int = 1


def _residual_on_cpu(tokens: int) -> Residual:
    """Put features first for few tokens: XLA's products then take less time on a CPU, as the weights are their left
    operand. With one token, or with many hundreds, they do not."""
    return FEATURES_FIRST if 1 < tokens <= 256 else PLAIN


_XLA = AttentionBackend("xla", plan_paged_attention, paged_attention, rotate_and_write)
_XLA_ON_CPU = replace(_XLA, residual=_residual_on_cpu)


def select_backend(name: str = "auto") -> AttentionBackend:
    """Return the backend called `name`; "auto" is the best one for the target device of compilation.

    "pallas" uses the Mosaic GPU kernels where they can run and plain XLA elsewhere, with a warning that says why.

    Raises:
        ValueError: there is no such backend.
    """
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend must be one of {', '.join(ATTENTION_BACKENDS)}, got {name!r}")
    if name == "xla" or (name == "auto" and _platform() != "gpu"):
        return _XLA_ON_CPU if _platform() == "cpu" else _XLA
    # On a CPU, Pallas for GPUs is not worth the time that its import takes.
    from kernels_pallas.add_and_norm.api import add_and_norm
    from kernels_pallas.branch_attention.api import branch_attention, plan_branch_attention
    from kernels_pallas.devices import num_cores, why_not_here
    from kernels_pallas.rotate_and_write import api as kernel

    if name == "auto" and why_not_here() is not None:
        return _XLA

    def parts(rows: int, inner: int, columns: int) -> int:
        return 1 if why_not_here() is not None else choose_parts(rows, inner, columns, num_cores())

    # A layer calls the kernel twice: jitted by itself, it is traced and lowered once. `partial` gives each backend a
    # function, and so a trace, of its own: the warning why a kernel does not run is given while tracing.
    residual = Residual(jax.jit(partial(add_and_norm), static_argnums=3), parts)
    return AttentionBackend(
        "pallas",
        plan_branch_attention,
        branch_attention,
        kernel.rotate_and_write,
        lambda tokens: residual,
        min_tokens=2,
    )


def _platform() -> str:
    """Return the platform of the target device of compilation, which need not be present."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if target is None else target.platform
