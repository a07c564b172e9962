"""Holds parameters, KV pool and the latest tokens on the device, and launches compiled steps on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.attention.tensor_parallel import over_devices
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, StepBatch, unpack
from jaxinfer.programs.commit_tail import commit_tail
from jaxinfer.programs.step import StepOutput, decode_loop, step
from jaxinfer.sampling.adjustments import Adjustments, adjust
from jaxinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxinfer.sampling.sampler import SamplingBatch, sample

# Prompt logits are made of this many positions at a time: [positions, vocabulary] in float32 is what it costs.
_PROMPT_LOGITS_BLOCK = 64


def padded_tokens(num_tokens: int) -> int:
    """The number of hidden states that a step of `num_tokens` returns: the next power of two."""
    return 1 << (num_tokens - 1).bit_length()


class StepRunner:
    """Launches steps; every method returns at once, and reading what it returns waits for the device.

    The model is flattened once: a call passes its leaves, and the module tree exists only while tracing. The token that
    a row samples also stays on the device, at the row's seat, so that the next step can be launched before it is read:
    a token id of -1 - seat in a batch means "the latest token of that seat".

    A model and a cache of shapes alone (`jax.ShapeDtypeStruct`) make a runner that compiles its programs for the device
    that the shapes name, and cannot run them.
    """

    def __init__(
        self,
        model: DecoderLM,
        cache: KVCache,
        backend: AttentionBackend,
        *,
        num_seats: int,
        max_decode_steps: int = 1,
        mesh: Mesh | None = None,
        on_compile: Callable[[str], None] = lambda program: None,
    ) -> None:
        backend = over_devices(backend, mesh)
        graph, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        # A leaf on the host would be sent anew with every launch.
        self.params = [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf) for leaf in leaves]
        self.cache = cache
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        if cache.is_abstract:
            self.latest: Any = jax.ShapeDtypeStruct((num_seats,), jnp.int32, sharding=everywhere)
        else:
            self.latest = jnp.zeros(num_seats, jnp.int32, device=everywhere)
        self.max_decode_steps = max_decode_steps

        def merge(params: list[jax.Array]) -> DecoderLM:
            return nnx.merge(graph, jax.tree.unflatten(structure, params))

        def readable(tree):
            """What the host reads has to be whole on every process's devices."""
            return tree if everywhere is None else lax.with_sharding_constraint(tree, everywhere)

        # `on_compile` is called while tracing, that is once for every compiled program.
        @partial(jax.jit, static_argnames="shape", donate_argnames=("cache", "latest"))
        def run_step(params, cache: KVCache, latest: jax.Array, buffer: jax.Array, shape: BatchShape):
            on_compile(f"step for {shape.describe()}")
            batch = _with_latest(unpack(buffer, shape), latest)
            cache, output = step(merge(params), cache, batch, backend)
            output = dataclasses.replace(output, token_ids=readable(output.token_ids))
            latest = latest.at[batch.seat].set(output.token_ids, mode="drop")
            # Few shapes of hidden states mean few programs that read them.
            extra = padded_tokens(shape.num_tokens) - shape.num_tokens
            output = dataclasses.replace(output, hidden=jnp.pad(output.hidden, ((0, extra), (0, 0))))
            return cache, latest, output, batch.sampling, batch.seat

        @partial(jax.jit, static_argnames="shape", donate_argnames=("cache", "latest"))
        def run_loop(params, cache: KVCache, latest: jax.Array, buffer: jax.Array, shape: BatchShape):
            on_compile(f"decode loop for {shape.describe()}")
            batch = _with_latest(unpack(buffer, shape), latest)
            cache, tokens = decode_loop(merge(params), cache, batch, backend, max_steps=max_decode_steps)
            last = lax.dynamic_index_in_dim(tokens, batch.num_steps - 1, keepdims=False)
            latest = latest.at[batch.seat].set(jnp.maximum(last, 0), mode="drop")
            return cache, latest, readable(tokens)

        @partial(jax.jit, donate_argnames="cache")
        def run_commit(cache: KVCache, moves: jax.Array) -> KVCache:
            on_compile(f"commit of up to {moves.shape[2]} draft tokens in {moves.shape[1]} rows")
            return commit_tail(cache, moves[0], moves[1])

        @partial(jax.jit, donate_argnames="latest")
        def run_resample(
            latest: jax.Array, logits: jax.Array, sampling: SamplingBatch, seat: jax.Array, adjustments: Adjustments
        ):
            on_compile(f"sampling of {logits.shape[0]} rows with {adjustments.row.shape[0]} adjustments")
            tokens = sample(adjust(logits, adjustments), sampling)
            return latest.at[seat].set(tokens, mode="drop"), *readable((tokens, token_logprobs(logits, tokens)))

        @jax.jit
        def run_prompt_logprobs(params, hidden: jax.Array, targets: jax.Array) -> TokenLogprobs:
            on_compile(f"log probabilities of {hidden.shape[0]} prompt tokens")
            model = merge(params)

            def one(position: tuple[jax.Array, jax.Array]) -> TokenLogprobs:
                return token_logprobs(model.logits(position[0][None]), position[1][None])

            found = lax.map(one, (hidden, targets), batch_size=_PROMPT_LOGITS_BLOCK)
            return readable(jax.tree.map(lambda x: x[:, 0], found))

        self._run_step, self._run_loop, self._run_commit = run_step, run_loop, run_commit
        self._run_resample, self._run_prompt_logprobs = run_resample, run_prompt_logprobs

    def step(self, packed: PackedBatch, adjustments: Adjustments | None = None) -> LaunchedStep:
        """One step. With `adjustments` its tokens are sampled from adjusted logits, and log probabilities are made."""
        self.cache, self.latest, output, sampling, seat = self._run_step(
            self.params, self.cache, self.latest, packed.buffer, shape=packed.shape
        )
        logprobs = None
        if adjustments is not None:
            self.latest, tokens, logprobs = self._run_resample(self.latest, output.logits, sampling, seat, adjustments)
            output = dataclasses.replace(output, token_ids=tokens)
        return LaunchedStep(output.token_ids[None], output, logprobs)

    def compile_step(self, shape: BatchShape) -> jax.stages.Compiled:
        """A step's compiled program, for its memory analysis or its text; nothing runs, model and cache may be
        abstract."""
        return self._compile(self._run_step, shape)

    def compile_decode_loop(self, shape: BatchShape) -> jax.stages.Compiled:
        """The same of a decode loop of `max_decode_steps`."""
        return self._compile(self._run_loop, shape)

    def _compile(self, program: Any, shape: BatchShape) -> jax.stages.Compiled:
        buffer = jax.ShapeDtypeStruct(PackedBatch(shape).buffer.shape, jnp.int32)
        return program.lower(self.params, self.cache, self.latest, buffer, shape=shape).compile()

    def decode_loop(self, packed: PackedBatch) -> LaunchedStep:
        """As many decode steps as the batch says, at most `max_decode_steps`."""
        self.cache, self.latest, tokens = self._run_loop(
            self.params, self.cache, self.latest, packed.buffer, shape=packed.shape
        )
        return LaunchedStep(tokens)

    def commit_tail(self, moves: np.ndarray | jax.Array) -> None:
        """Keep accepted draft tokens of the step before, see `commit_tail`; a program for each R and N.

        Args:
            moves: int32 [2, R, N], source and destination slots, -1 for padding. In one array because a host sends one
                faster than two; it may be on the device already, where `tail_moves` makes it.
        """
        self.cache = self._run_commit(self.cache, moves)

    def prompt_logprobs(self, output: StepOutput, targets: np.ndarray) -> TokenLogprobs:
        """Log probabilities of `targets` int32 [T], each after its token of a step; arrays of at least T positions."""
        targets = np.pad(targets, (0, output.hidden.shape[0] - len(targets)))
        return self._run_prompt_logprobs(self.params, output.hidden, targets)


@dataclasses.dataclass(frozen=True)
class LaunchedStep:
    """Results that may not be there yet."""

    token_ids: jax.Array  # int32 [steps, Q], -1 where a row had ended
    output: StepOutput | None = None  # of a single step
    logprobs: TokenLogprobs | None = None  # [Q], of a step with adjustments


def _with_latest(batch: StepBatch, latest: jax.Array) -> StepBatch:
    ids = batch.token_ids
    return dataclasses.replace(batch, token_ids=jnp.where(ids < 0, latest[jnp.maximum(-1 - ids, 0)], ids))
