"""The plan: whether a model with a batch size and a length fits a GPU, what else would fit, and how fast it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxinfer.config import EngineConfig
from jaxinfer.memory.budget import MemoryBudget
from jaxinfer.memory.share import check_utilization, engine_share, reserve_of
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.arithmetic import (
    decode_bytes,
    outside_windows_bytes,
    prefill_operations,
    token_bytes,
    weights_bytes,
)
from jaxinfer.planning.devices import GPU
from jaxinfer.sampling.bounds import Bounds
from jaxinfer.strategies.draft_options import SpeculativeConfig


@dataclass(frozen=True)
class PlannedSpeculation:
    """Speculative configuration of an engine, and that of its draft model or head, if the method has one."""

    config: SpeculativeConfig
    drafter: Any = None

    @property
    def layers(self) -> ModelConfig | None:
        """Layers whose keys and values the drafter keeps."""
        return None if self.drafter is None else self.config.row.device.layers(self.drafter)


@dataclass(frozen=True)
class PlanRequest:
    """Settings to plan for: this model, with these limits of an engine, on this GPU or on several of its kind.

    Raises:
        ValueError: a field is out of range, or the model cannot be split over so many GPUs.
    """

    model: ModelConfig
    engine: EngineConfig  # its pool holds max_num_seqs sequences of max_model_len
    gpu: GPU
    dtype: jnp.dtype
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    speculation: PlannedSpeculation | None = None
    jax_memory_share: float | None = None  # of the GPU, as the environment says; None: as the engine sets it

    def __post_init__(self) -> None:
        check_utilization(self.gpu_memory_utilization)

    @property
    def engine_share(self) -> float:
        """Share of a GPU's memory that the engine may use."""
        return engine_share(self.gpu_memory_utilization, self.jax_memory_share)

    @property
    def limit_bytes(self) -> int:
        """Bytes that the engine may use of one GPU."""
        return int(self.gpu.memory_bytes * self.engine_share)

    @property
    def sequence_tokens(self) -> int:
        """KV slots of one sequence of full length, which are whole pages."""
        size = self.engine.page_size
        return -(-self.engine.max_model_len // size) * size


@dataclass(frozen=True)
class Compiled:
    """Figures from compiling: the largest program's workspace, KV in place and copied, kernels.

    Attributes:
        programs: one object for each program, for the report.
    """

    temp_bytes: int
    kv_alias_bytes: int
    kv_copies: int
    host_waits: int
    decode_kernels_per_layer: float
    programs: Sequence[Any]


@dataclass(frozen=True)
class Plan:
    """Figures of one GPU. Floors are times that no program can beat on it, not predictions.

    Attributes:
        weights_bytes, kv_bytes: of all parameters; of `max_num_seqs` sequences of `max_model_len` tokens.
        kv_alias_bytes: KV that every compiled program updates in place; less than kv_bytes if one does not.
        kv_copies: times that a compiled program writes an array of the pool anew, all programs together.
        host_waits: places in all programs where the GPU waits for the host within a launch; it should be 0.
        temp_bytes: temporaries and results of the largest program.
        fits: weights, KV, temporaries and the reserve stay within `limit_bytes`; without compiling, all but the
            temporaries.
        largest_kv_tokens: the most KV slots, in whole pages, within `limit_bytes`.
        decode_kernels_per_layer: kernels that a layer adds to a decode step.
        decode_floor_ms: reading the weights and the KV of all sequences at full length; of the embedding table only the
            tokens' rows, unless it is the output head too.
        prefill_floor_ms: the operations of a step full of prompt tokens, or reading the weights if that takes longer.
        limit_bytes: bytes that the engine may use.
        reserve_bytes: bytes of them that it keeps free for what is not counted.
        largest_max_num_seqs, largest_max_model_len: with all other settings as they are; 0 if not even one fits. More
            sequences than asked for are charged temporaries in proportion, which is more than they take.
        decode_floor_one_sequence_ms: `decode_floor_ms` for one sequence at the start of its output.
        kv_outside_windows_bytes: of kv_bytes, KV that no token sees any more at full length. Windows free no pages yet.
    """

    weights_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    kv_alias_bytes: int | None
    kv_copies: int | None
    temp_bytes: int | None
    fits: bool
    largest_kv_tokens: int
    decode_kernels_per_layer: float | None
    host_waits: int | None
    decode_floor_ms: float
    prefill_floor_ms: float
    limit_bytes: int
    reserve_bytes: int
    largest_max_num_seqs: int
    largest_max_model_len: int
    decode_floor_one_sequence_ms: float
    kv_outside_windows_bytes: int


def make_plan(request: PlanRequest, compiled: Compiled | None = None) -> Plan:
    """Return the plan of a request: arithmetic, completed by the figures from compiling.

    Raises:
        ValueError: the model cannot be split over so many GPUs.
    """
    model, engine, dtype, devices = request.model, request.engine, request.dtype, request.tensor_parallel_size
    per_token = token_bytes(model, dtype, devices=devices)
    weights = weights_bytes(model, dtype, devices=devices)
    if request.speculation is not None and request.speculation.drafter is not None:
        assert request.speculation.layers is not None
        per_token += token_bytes(request.speculation.layers, dtype, devices=devices)
        weights += weights_bytes(request.speculation.drafter, dtype, devices=devices)
    budget = MemoryBudget(
        limit_bytes=request.limit_bytes,
        weights_bytes=weights,
        workspace_bytes=_seats_bytes(request) + (0 if compiled is None else compiled.temp_bytes),
        kv_bytes_per_token=per_token,
        kv_tokens=engine.max_num_seqs * request.sequence_tokens,
        reserve_bytes=reserve_of(request.limit_bytes),
    )
    largest_tokens = budget.largest_kv_tokens // engine.page_size * engine.page_size
    return Plan(
        weights_bytes=budget.weights_bytes,
        kv_bytes=budget.kv_bytes,
        kv_bytes_per_token=per_token,
        kv_alias_bytes=None if compiled is None else compiled.kv_alias_bytes,
        kv_copies=None if compiled is None else compiled.kv_copies,
        temp_bytes=None if compiled is None else compiled.temp_bytes,
        fits=budget.fits,
        largest_kv_tokens=largest_tokens,
        decode_kernels_per_layer=None if compiled is None else compiled.decode_kernels_per_layer,
        host_waits=None if compiled is None else compiled.host_waits,
        decode_floor_ms=_decode_floor_ms(request, engine.max_num_seqs, engine.max_num_seqs * engine.max_model_len),
        prefill_floor_ms=_prefill_floor_ms(request),
        limit_bytes=budget.limit_bytes,
        reserve_bytes=budget.reserve_bytes,
        largest_max_num_seqs=_largest_max_num_seqs(request, budget),
        largest_max_model_len=_largest_max_model_len(request, largest_tokens),
        decode_floor_one_sequence_ms=_decode_floor_ms(request, 1, 1),
        kv_outside_windows_bytes=engine.max_num_seqs
        * outside_windows_bytes(model, dtype, length=request.sequence_tokens, devices=devices),
    )


def compiled_figures(programs: Sequence[Any], kernels_per_layer: float) -> Compiled:
    """Return the figures of all programs of `compile_plan` together: extremes, or sums."""
    return Compiled(
        temp_bytes=max(program.temp_bytes for program in programs),
        kv_alias_bytes=min(program.kv_alias_bytes for program in programs if program.kv_alias_bytes is not None),
        kv_copies=sum(program.kv_copies for program in programs),
        host_waits=sum(program.host_waits for program in programs),
        decode_kernels_per_layer=kernels_per_layer,
        programs=programs,
    )


def _seats_bytes(request: PlanRequest) -> int:
    """Return the bytes of the bounds of all seats; 0 for a diffusion model."""
    if request.model.mask_token_id is not None:
        return 0
    return Bounds.bytes_of(request.engine.max_num_seqs, request.model.vocab_size, request.tensor_parallel_size)


def _decode_floor_ms(request: PlanRequest, rows: int, visible_tokens: int) -> float:
    read = decode_bytes(
        request.model, request.dtype, rows=rows, visible_tokens=visible_tokens, devices=request.tensor_parallel_size
    )
    return 1e3 * read / request.gpu.bandwidth


def _prefill_floor_ms(request: PlanRequest) -> float:
    tokens = request.engine.max_num_batched_tokens
    operations = prefill_operations(
        request.model,
        tokens=tokens,
        prompt_len=min(tokens, request.engine.max_model_len),
        devices=request.tensor_parallel_size,
    )
    return max(1e3 * operations / request.gpu.matmul_rate, _decode_floor_ms(request, tokens, 0))


def _largest_max_num_seqs(request: PlanRequest, budget: MemoryBudget) -> int:
    asked, sequence = request.engine.max_num_seqs, request.sequence_tokens
    fitting = budget.largest_kv_tokens // sequence
    if fitting > asked:
        # No part of the workspace grows faster than the rows.
        room = budget.limit_bytes - budget.weights_bytes - budget.reserve_bytes
        each = sequence * budget.kv_bytes_per_token * asked + budget.workspace_bytes
        fitting = max(asked, room * asked // each)
    return min(fitting, request.engine.max_num_batched_tokens)


def _largest_max_model_len(request: PlanRequest, kv_tokens: int) -> int:
    size = request.engine.page_size
    length = kv_tokens // request.engine.max_num_seqs // size * size
    if request.model.rope.depends_on_length:
        return length
    return min(length, request.model.max_position_embeddings)
