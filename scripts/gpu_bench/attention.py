"""Attention of one layer: the branch attention kernel, cuDNN and plain XLA on the same steps, and the kernel's error.

A time is that of a chain of layers in one program, each with K and V of its own and with the layer before's result as
its queries, divided by their number: what a layer costs in a model, where the pages are not in the cache any more and
the plan of a step is made once.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_bench.arithmetic import attention_flops
from gpu_bench.lanes import LaneRow, LaneStep, Pages, branch_row, lay_out, plain_row, slots_of, tree_row, visible_pairs
from gpu_bench.plan import LARGEST_ERROR, LONG_PAGES, PAGE_SIZE, SHORT_PAGES, Case, NotRun, attention_heads
from gpu_bench.timing import time_launches
from kernels_pallas.branch_attention.api import branch_attention, plan_branch_attention
from kernels_pallas.branch_attention.blocks import AttentionSizes
from kernels_pallas.branch_attention.reference import paged_attention, plan_paged_attention
from kernels_pallas.devices import why_not_here

# Layers of a chain, and the bytes of K and V that they read together: several times what the card's cache holds.
_LAYERS = {"kernel": 36, "cudnn": 12, "xla": 4}
_MIN_BYTES, _MOST_POOLS = 256 * 2**20, 24

_CHECKED = {
    "long": {"num_pages": 4096, "pages_per_row": SHORT_PAGES, "longest": 4000, "rows": 16, "prompt": 700,
             "trunk": 2048, "own": 64, "branches": 8, "nodes": 60},
    "short": {"num_pages": 64, "pages_per_row": 8, "longest": 60, "rows": 2, "prompt": 20,
              "trunk": 32, "own": 16, "branches": 2, "nodes": 6},
}  # fmt: skip

type Pools = tuple[Sequence[jax.Array], Sequence[jax.Array]]


def measure_attention(case: Case, *, smoke: bool) -> dict[str, Any]:
    """One row of the tables.

    Raises:
        NotRun: the implementation does not run here.
    """
    implementation = case["implementation"]
    reason = why_not(implementation)
    if reason is not None:
        raise NotRun(reason)
    heads, kv_heads, dim = attention_heads(smoke=smoke)
    step, num_pages = build_step(case)
    slot_bytes = kv_heads * dim * 2 * 2
    layers = 2 if smoke else _LAYERS[implementation]
    fewest = pages_needed(case, min(case["pool_contexts"])) * PAGE_SIZE * slot_bytes
    count = 1 if smoke else max(1, min(_MOST_POOLS, layers, math.ceil(_MIN_BYTES / fewest)))
    pools = random_pools(count, (num_pages, PAGE_SIZE, kv_heads, dim))
    q = jax.random.normal(jax.random.key(11), (step.num_tokens, heads, dim), jnp.bfloat16)
    causal = case["kind"] == "prefill"
    rest: Any = step.metadata
    if implementation == "cudnn":
        q, pools, rest = contiguous(step, pools, q, causal=causal)
    run = attention_program(implementation, layers, causal, dim**-0.5)
    timing = time_launches(lambda: run(q, *pools, rest))
    # Short rows are bound by the bytes of K and V, a long prompt by its products; with_floor takes the longer.
    return timing.row(per_launch=layers) | {
        "bytes": step.kv_tokens * slot_bytes,
        "flops": attention_flops(step.pairs, heads, dim),
        "layers": layers,
        "pools": count,
    }


def check_kernel(case: Case, *, smoke: bool) -> dict[str, Any]:
    """The kernel's relative error against plain XLA in float32, on fresh random numbers; unused memory holds NaN.

    Raises:
        NotRun: the kernel does not run here.
        RuntimeError: the error is beyond LARGEST_ERROR.
    """
    interpret = None
    if smoke:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams()
    elif (reason := why_not_here()) is not None:
        raise NotRun(reason)
    seed = secrets.randbits(31)
    heads, kv_heads, dim = case["heads"]
    step, num_pages = _checked_step(case["kind"], case["size"], seed)
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (num_pages, PAGE_SIZE, kv_heads, dim)
    slots = _written_slots(step, num_pages)
    k, v = (jnp.where(slots[..., None, None], jax.random.normal(key, shape, jnp.bfloat16), jnp.nan) for key in keys[:2])
    q = jax.random.normal(keys[2], (step.num_tokens, heads, dim), jnp.bfloat16)
    scale = dim**-0.5
    plan = partial(plan_branch_attention, reference=_refuse, interpret=interpret)
    kernel = jax.jit(partial(_chain, plan, partial(branch_attention, scale=scale), 1))
    found = np.asarray(kernel(q, [k], [v], step.metadata).astype(jnp.float32))
    with jax.default_matmul_precision("highest"):  # else float32 products may be made of shorter numbers
        reference = jax.jit(partial(_chain, plan_paged_attention, partial(paged_attention, scale=scale), 1))
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        expected = np.asarray(reference(wide[0], wide[1:2], wide[2:], step.metadata))
    error = relative_error(found, expected, np.asarray(step.metadata.limit) >= 0)
    if not error <= LARGEST_ERROR:  # NaN is not
        raise RuntimeError(f"the relative error is {error:.3g}, at most {LARGEST_ERROR:g} is right (seed {seed})")
    return {"relative_error": error, "seed": seed, "form": "interpreted" if smoke else "on the device"}


def relative_error(found: np.ndarray, expected: np.ndarray, tokens: np.ndarray) -> float:
    """The largest error of any head of any of the `tokens` (bool [T]), over the norm of that head's result."""
    error = np.linalg.norm(found[tokens] - expected[tokens], axis=-1)
    return float((error / np.linalg.norm(expected[tokens], axis=-1)).max())


def why_not(implementation: str) -> str | None:
    """Why an implementation does not run on this device, in words; None if it does."""
    if implementation == "kernel":
        return why_not_here()
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        return f"cuDNN needs an NVIDIA GPU, the device is {jax.devices()[0].device_kind!r}"
    return None


def pages_needed(case: Case, context: int) -> int:
    """Pages of a pool that holds the step of `case`, were its context so long."""
    rows, own = case["rows"], case.get("own", 0)
    if case["kind"] == "branches":
        return (context + rows * own) // PAGE_SIZE
    # With a common trunk not all pages are used, but the program is that of lanes of their own.
    return rows * -(-(context + own + case.get("nodes", 0)) // PAGE_SIZE)


def build_step(case: Case) -> tuple[LaneStep, int]:
    """The step of a case and the pages of its pool, which cases of other contexts may share with it."""
    kind, rows, context, own = case["kind"], case["rows"], case["context"], case.get("own", 0)
    new = case.get("nodes", 1)
    bucket = SHORT_PAGES if context + rows * own + new <= SHORT_PAGES * PAGE_SIZE else LONG_PAGES
    num_pages = pages_needed(case, max(case["pool_contexts"]))
    pages = Pages(num_pages, PAGE_SIZE, seed=13)
    prefill: list[LaneRow] = []
    if kind == "decode":
        decode = [plain_row(pages.take(context), context - 1) for _ in range(rows)]
    elif kind == "prefill":
        decode, prefill = [], [plain_row(pages.take(context), 0, context)]
    elif kind == "tree":
        decode = [tree_row(pages.take(context + new), context, new, seed) for seed in range(rows)]
    elif kind == "branches":
        decode = [branch_row(pages.take(context + rows * own), PAGE_SIZE, rows, context, own)]
    else:
        trunk = pages.take(context) if kind == "shared" else None
        decode = []
        for _ in range(rows):
            start = pages.take(context) if trunk is None else trunk
            decode.append(plain_row(np.concatenate([start, pages.take(own)]), context + own - 1))
    return lay_out(decode, prefill, pages_per_row=bucket, num_pages=num_pages, page_size=PAGE_SIZE), num_pages


def random_pools(count: int, shape: tuple[int, ...]) -> Pools:
    """K and V of `count` layers."""
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    keys = jax.random.split(jax.random.key(12), 2 * count)
    return [make(key) for key in keys[:count]], [make(key) for key in keys[count:]]


def contiguous(
    step: LaneStep, pools: Pools, q: jax.Array, *, causal: bool
) -> tuple[jax.Array, Pools, jax.Array | None]:
    """Return a step's task for an implementation without pages; all rows have as many queries and tokens.

    Returns:
        The queries [B, Q, heads, head_dim]; K and V of every layer [B, S, kv_heads, head_dim]; the mask [B, 1, Q, S],
        or None where the queries see everything or the causal rule says it all.
    """
    table = np.stack([row.pages for row in step.rows])
    length = step.rows[0].kv_len

    def gather(pages: jax.Array) -> jax.Array:
        return pages[table].reshape(len(table), -1, *pages.shape[2:])[:, :length]

    seen = None if causal else np.stack([visible_pairs(row, PAGE_SIZE) for row in step.rows])
    mask = None if seen is None or seen.all() else jnp.asarray(seen[:, None])
    gathered = jax.jit(gather)
    k, v = ([gathered(pages) for pages in side] for side in pools)
    return q.reshape(len(table), -1, *q.shape[1:]), (k, v), mask


def dense_layer(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, *, causal: bool, implementation: Any
) -> jax.Array:
    """JAX's own attention over contiguous K and V."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation=implementation)


@cache
def attention_program(implementation: str, layers: int, causal: bool, scale: float) -> Callable[..., jax.Array]:
    """The jitted chain; cases of the same shapes share what it compiles."""
    plan: Any = None
    if implementation == "cudnn":
        layer = partial(dense_layer, causal=causal, implementation="cudnn")
    elif implementation == "kernel":
        plan, layer = partial(plan_branch_attention, reference=_refuse), partial(branch_attention, scale=scale)
    else:
        plan, layer = plan_paged_attention, partial(paged_attention, scale=scale)
    return jax.jit(partial(_chain, plan, layer, layers))


def _chain(
    plan: Callable[..., Any] | None, layer: Callable[..., jax.Array], layers: int, q: jax.Array,
    k: Sequence[jax.Array], v: Sequence[jax.Array], rest: Any,
) -> jax.Array:  # fmt: skip
    """`rest` is what `layer` takes after K and V, or, with a `plan`, the step that it is made of."""
    if plan is not None:
        rest = plan(rest, AttentionSizes.of(q, k[0]))
    once = jax.jit(layer)  # traced and lowered once
    for index in range(layers):
        q = once(q, k[index % len(k)], v[index % len(v)], rest)
    return q


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("plain XLA was asked instead of the kernel: the log says why")


def _checked_step(kind: str, size: str, seed: int) -> tuple[LaneStep, int]:
    """A step for the check, in sizes that a GPU meets or in "short" ones, which can be interpreted."""
    sizes = _CHECKED[size]
    rng = np.random.default_rng(seed)
    pages = Pages(sizes["num_pages"], PAGE_SIZE, seed)

    def plain(new: int = 1) -> LaneRow:
        context = int(rng.integers(0, sizes["longest"] - new))
        return plain_row(pages.take(context + new), context, new)

    def branches() -> LaneRow:
        trunk, own, count = sizes["trunk"], sizes["own"], sizes["branches"]
        return branch_row(pages.take(trunk + count * own), PAGE_SIZE, count, trunk, own)

    def tree() -> LaneRow:
        context, nodes = int(rng.integers(1, sizes["longest"] // 2)), sizes["nodes"]
        return tree_row(pages.take(context + nodes), context, nodes, seed)

    decode = {
        "decode": lambda: [plain() for _ in range(sizes["rows"])],
        "prefill": lambda: [],
        "branches": lambda: [branches()],
        "tree": lambda: [tree(), tree()],
        "mixed": lambda: [plain(), branches(), tree(), plain()],
    }[kind]()
    prefill = {"prefill": lambda: [plain(sizes["prompt"]), plain(3)], "mixed": lambda: [plain(sizes["prompt"])]}
    rows = prefill[kind]() if kind in prefill else []
    laid = lay_out(
        decode, rows, pages_per_row=sizes["pages_per_row"], num_pages=sizes["num_pages"], page_size=PAGE_SIZE
    )
    return laid, sizes["num_pages"]


def _written_slots(step: LaneStep, num_pages: int) -> np.ndarray:
    """bool [num_pages, page_size]: slots whose content at least one query sees."""
    written = np.zeros(num_pages * PAGE_SIZE, bool)
    for row in step.rows:
        written[slots_of(row, PAGE_SIZE)[visible_pairs(row, PAGE_SIZE).any(axis=0)]] = True
    return written.reshape(num_pages, PAGE_SIZE)
