"""A plan as a table with a verdict for people, and as JSON for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table

from jaxinfer.memory.share import RESERVED, SHARE_VARIABLE
from jaxinfer.planning.plan import Compiled, Plan, PlanRequest

HOW_TO_COMPILE = (
    'Not compiled, so temporaries are not counted and kernels not known: pip install "jaxinfer[cuda13]" brings the '
    "compiler (no GPU needed)."
)


def verdict(plan: Plan, request: PlanRequest) -> str:
    """Return one sentence: whether the settings fit, and the largest ones that do."""
    engine = request.engine
    needed = plan.weights_bytes + plan.kv_bytes + (plan.temp_bytes or 0)
    asked = f"{engine.max_num_seqs} sequences of {engine.max_model_len} tokens"
    whose = "each" if request.tensor_parallel_size > 1 else "an"
    limit = _gigabytes(plan.limit_bytes)
    room = (
        f"{_gigabytes(needed)} of the {limit} that the engine may use of {whose} {request.gpu.device_kind} "
        f"({_gigabytes(plan.reserve_bytes)} are kept free)"
    )
    if plan.fits:
        return (
            f"fits: {asked} take {room}. Largest settings: {plan.largest_max_num_seqs} such sequences, or "
            f"{engine.max_num_seqs} of {plan.largest_max_model_len} tokens."
        )
    if not plan.largest_kv_tokens:
        return f"does not fit: the weights leave no room for KV; {asked} would take {room}."
    options = [
        text
        for text, possible in (
            (f"{plan.largest_max_num_seqs} sequences of {engine.max_model_len} tokens", plan.largest_max_num_seqs),
            (f"{engine.max_num_seqs} of {plan.largest_max_model_len} tokens", plan.largest_max_model_len),
        )
        if possible
    ] or [f"1 sequence of {plan.largest_kv_tokens} tokens"]
    return f"does not fit: {asked} would take {room}. Largest that does: {', or '.join(options)}."


def plan_table(plan: Plan, request: PlanRequest, compiled: Compiled | None, *, model: str) -> Table:
    """Return the table of the figures and their sources."""
    engine, gpu = request.engine, request.gpu
    devices = f"{request.tensor_parallel_size} x " if request.tensor_parallel_size > 1 else ""
    table = Table("", "value", "what it is", title=f"{model} in {request.dtype} on {devices}{gpu.device_kind}")
    table.title_justify = "left"
    table.add_row("weights", _gigabytes(plan.weights_bytes), "of each GPU" if devices else "")
    table.add_row(
        "KV", _gigabytes(plan.kv_bytes),
        f"{engine.max_num_seqs} x {request.sequence_tokens} tokens of {plan.kv_bytes_per_token} bytes",
    )  # fmt: skip
    if plan.kv_outside_windows_bytes:
        table.add_row(
            "KV outside of windows", _gigabytes(plan.kv_outside_windows_bytes),
            "kept, and not read: what windows would save at full length",
        )  # fmt: skip
    if compiled is not None:
        table.add_row("temporaries", _gigabytes(compiled.temp_bytes), "and results of the largest program")
    table.add_row("reserve", _gigabytes(plan.reserve_bytes), f"{RESERVED:.0%} of the limit, for what is not counted")
    table.add_row("limit", _gigabytes(plan.limit_bytes), _limit_in_words(request))
    table.add_row("largest KV pool", f"{plan.largest_kv_tokens} tokens", "within the limit")
    table.add_section()
    bandwidth = f"{gpu.bandwidth / 1e12:.2f} TB/s {_source(gpu.measured_bandwidth)}"
    table.add_row(
        "decode floor", f"{plan.decode_floor_ms:.2f} ms",
        f"all {engine.max_num_seqs} at full length: bytes at {bandwidth}",
    )  # fmt: skip
    table.add_row("decode floor, 1 sequence", f"{plan.decode_floor_one_sequence_ms:.2f} ms", "short: weights alone")
    table.add_row(
        "prefill floor", f"{plan.prefill_floor_ms:.2f} ms",
        f"{engine.max_num_batched_tokens} tokens at {gpu.matmul_rate / 1e12:.0f} TFLOP/s "
        f"{_source(gpu.measured_matmul_rate)}",
    )  # fmt: skip
    if compiled is not None:
        table.add_section()
        table.add_row("kernels per layer", f"{compiled.decode_kernels_per_layer:g}", "of a decode step")
        table.add_row("KV updated in place", _gigabytes(compiled.kv_alias_bytes), "by every program")
        table.add_row("copies of KV", f"{compiled.kv_copies}", "in all programs")
        table.add_row("waits for the host", f"{compiled.host_waits}", "in all programs")
        for program in compiled.programs:
            table.add_row(
                program.name.replace("_", " "), f"{program.kernels} kernels",
                f"{program.description}; {_gigabytes(program.temp_bytes)} of temporaries",
            )  # fmt: skip
    return table


def as_json(plan: Plan, request: PlanRequest, compiled: Compiled | None, *, model: str) -> dict[str, Any]:
    """Return the plan's figures, then its settings, the GPU and the programs; null for what was not compiled."""
    engine = request.engine
    return dataclasses.asdict(plan) | {
        "settings": {
            "model": model,
            "dtype": str(request.dtype),
            "max_num_seqs": engine.max_num_seqs,
            "max_model_len": engine.max_model_len,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "page_size": engine.page_size,
            "gpu_memory_utilization": request.gpu_memory_utilization,
            "jax_memory_share": request.jax_memory_share,
            "tensor_parallel_size": request.tensor_parallel_size,
            "speculative": None if request.speculation is None else request.speculation.config.method,
        },
        "device": dataclasses.asdict(request.gpu),
        "programs": None if compiled is None else [dataclasses.asdict(program) for program in compiled.programs],
    }


def _limit_in_words(request: PlanRequest) -> str:
    share, asked = request.engine_share, request.gpu_memory_utilization
    words = f"{share:g} of the card's {_gigabytes(request.gpu.memory_bytes)}"
    if share == asked:
        return f"{words} (gpu_memory_utilization)"
    why = "the most that JAX is given" if request.jax_memory_share is None else f"JAX's share ({SHARE_VARIABLE})"
    return f"{words}: {why}, less than gpu_memory_utilization={asked:g}"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _source(measured: float | None) -> str:
    return "nominal" if measured is None else "measured"
