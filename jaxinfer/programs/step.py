"""The step: new tokens into their slots, logits where wanted, sampled tokens out. (params, state, batch) -> (...)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, StepBatch, idle_batch, unpack
from jaxinfer.programs.forward import forward_with_features
from jaxinfer.programs.program import BOUNDS, KV, SEATS, TARGET, Device, Place
from jaxinfer.programs.seats import Seats, bounded_draws, count_latest, read_seats, write_seats
from jaxinfer.sampling.bounds import Bounds
from jaxinfer.sampling.logprobs import TokenLogprobs
from jaxinfer.sampling.next_tokens import as_held, logits_and_greedy, redrawn
from jaxinfer.sampling.noted import Draws, Noting, taken
from jaxinfer.sampling.sampler import sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """Results of a step, on the device. T tokens, Q wanted logits, V words."""

    token_ids: jax.Array  # int32 [Q], sampled; -1 where the row is idle, NO_SCORE where nothing could be
    was_redrawn: jax.Array  # bool [Q], tokens that are not those of a draw without a mask
    logprobs: TokenLogprobs  # [1, Q], of these, where the batch wants them; else zeros
    hidden: jax.Array  # [T, hidden], after the final norm


class Stepped(NamedTuple):
    """State after a step, its results, and the input of a follower."""

    kv: KVPool
    seats: Seats
    bounds: Bounds
    output: StepOutput
    batch: StepBatch  # completed from the seats
    features: jax.Array | None  # [T, F * hidden], the inputs of captured layers


def step(
    model: DecoderLM,
    kv: KVPool,
    seats: Seats,
    bounds: Bounds,
    batch: StepBatch,
    backend: AttentionBackend,
    capture: Sequence[int] = (),
    *,
    processed: bool = False,
) -> Stepped:
    """Run one step; every way of decoding uses it.

    Args:
        processed: log probabilities, see `Noting`.
    """
    batch = read_seats(batch, seats, page_size=kv.page_size, num_slots=kv.num_slots)
    kv, hidden, features = forward_with_features(model, kv, batch, backend, capture)
    logits, greedy = logits_and_greedy(model, hidden[batch.logits_index])
    bounded = bounded_draws(batch, bounds)
    held, greedy = as_held(logits, greedy, bounded)
    sampling = batch.samples.sampling
    tokens = sample(held, sampling, greedy)
    refused = bounded.refused(tokens)
    tokens = redrawn(tokens, refused, lambda: sample(bounded.within_masks(held), sampling))
    seats, landed = write_seats(seats, batch, tokens)
    noting = Noting(batch.wants_logprobs > 0, processed)
    wanted = (batch.wants_list > 0) & (landed != -1)
    likely = noting.likely(
        wanted, lambda: Draws(partial(taken, logits), tokens, sampling, bounded), vocab=logits.shape[1]
    )
    logprobs = jax.tree.map(lambda x: x[None], noting.of(logits, tokens, sampling, bounded).beside(likely))
    bounds = count_latest(batch, bounds, landed)
    return Stepped(kv, seats, bounds, StepOutput(landed, refused, logprobs, hidden), batch, features)


class Follower(Protocol):
    """Device half of a drafter that takes in the tokens of steps, and returns its changed parts of the state."""

    @property
    def reads(self) -> Sequence[str]: ...  # names of models

    @property
    def writes(self) -> Sequence[str]: ...  # names of parts of the state

    @property
    def capture(self) -> Sequence[int]: ...  # layers of the target whose inputs it takes in too

    def follow(
        self, device: Device, batch: StepBatch, features: jax.Array | None, *, again: bool = False
    ) -> dict[str, Any]: ...


def padded_to(sizes: Sequence[int], count: int) -> int:
    """Return the smallest of `sizes` that holds `count` hidden states; `count` if none does."""
    return min([size for size in sizes if size >= count], default=count)


@dataclass(frozen=True, eq=False)
class Step:
    """Program of one step, which has chunks of prompts. Its input is a packed batch, which says whether the follower,
    if there is one, takes part.

    Attributes:
        hidden_sizes: numbers of hidden states that a later program reads.
    """

    shapes: Sequence[BatchShape] = ()
    follower: Follower | None = None
    hidden_sizes: Sequence[int] = ()
    processed: bool = False  # log probabilities, see `Noting`

    @property
    def reads(self) -> Sequence[str]:
        return (TARGET,) if self.follower is None else (TARGET, *self.follower.reads)

    @property
    def writes(self) -> Sequence[str]:
        own = (KV, SEATS, BOUNDS)
        return own if self.follower is None else (*own, *self.follower.writes)

    @property
    def planned(self) -> dict[str, BatchShape]:
        return {"prefill": self.largest}

    @property
    def largest(self) -> BatchShape:
        """Shape with the most tokens and rows."""
        return max(self.shapes, key=lambda s: (s.num_tokens, s.num_logits, s.num_rows, s.pages_per_row))

    def describe(self, shape: BatchShape) -> str:
        return f"step for {shape.describe()}"

    def idle(self, shape: BatchShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], StepOutput]:
        """Return the state, and the output with padded hidden states: few shapes of them need few programs that read
        them."""
        capture = () if self.follower is None else self.follower.capture
        state = device.state
        kv, seats, bounds, output, batch, features = step(
            device.models[TARGET],
            state[KV],
            state[SEATS],
            state[BOUNDS],
            unpack(buffer, shape),
            device.backend,
            capture,
            processed=self.processed,
        )
        followed = {} if self.follower is None else _followed(self.follower, device, batch, features)
        extra = padded_to(self.hidden_sizes, shape.num_tokens) - shape.num_tokens
        return {**followed, KV: kv, SEATS: seats, BOUNDS: device.placed(bounds)}, StepOutput(
            token_ids=device.readable(output.token_ids),
            was_redrawn=device.readable(output.was_redrawn),
            logprobs=device.readable(output.logprobs),
            hidden=device.readable(jnp.pad(output.hidden, ((0, extra), (0, 0)))),
        )


def _followed(follower: Follower, device: Device, batch: StepBatch, features: jax.Array | None) -> dict[str, Any]:
    """Return the follower's parts of the state, with the tokens of a step if the batch says so."""

    def follow(state: dict[str, Any]) -> dict[str, Any]:
        return follower.follow(replace(device, state={**device.state, **state}), batch, features)

    own = {name: device.state[name] for name in follower.writes}
    return lax.cond(batch.drafter_follows > 0, follow, lambda state: state, own)
