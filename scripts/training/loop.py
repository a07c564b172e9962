"""Training of the embedded checkpoints: schedule, next-token loss, optimizer and loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import causal_attention
from jaxinfer.attention.heads import ProjectedHeads
from kernels_pallas.rotate_and_write.reference import rotate
from training.initialization import CONTEXT, Params
from training.packing import Packer, Rows

RowLosses = Callable[[Params, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]
"""Of parameters and the arrays of packed rows: the weighted sum of the tokens' losses, and the sum of their weights."""


@dataclass(frozen=True)
class TrainingConfig:
    """The schedule. Rates are peaks: linear warm-up, constant, then linear decay to zero over the last part.

    `groups` are the (rows, length) of a usual step; every `long_every` steps, `long_groups` with whole contexts.
    """

    steps: int = 1300
    warmup: int = 30
    decay: float = 0.5
    matrix_rate: float = 0.02
    other_rate: float = 4e-3
    weight_decay: float = 0.01
    prompt_weight: float = 0.25
    optimizer: str = "muon"
    groups: tuple[tuple[int, int], ...] = ((12, 128), (6, 256))
    long_groups: tuple[tuple[int, int], ...] = ((4, 128), (4, 256), (2, CONTEXT))
    long_every: int = 20

    def __post_init__(self) -> None:
        if self.steps <= self.warmup:
            raise ValueError(f"steps={self.steps} must be more than warmup={self.warmup}")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer={self.optimizer!r} is unknown, allowed are 'muon', 'adamw'")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must be above 0 and at most 1")


@dataclass
class History:
    """What the loop saw, (step, value) pairs, steps, tokens and seconds."""

    training_loss: list[tuple[int, float]] = field(default_factory=list)
    held_out_loss: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def latest(self) -> str:
        """One line on the progress of the training."""
        loss, held_out = self.training_loss[-1][1], self.held_out_loss[-1][1]
        return f"step {self.steps:5d}  loss {loss:.3f}  held-out {held_out:.3f}  {self.seconds / 60:.1f} min"


def module_of(graph: nnx.GraphDef, params: Params) -> nnx.Module:
    """The module with these parameters."""

    def key(part: str) -> str | int:
        return int(part) if part.isdigit() else part

    flat: dict[Any, Any] = {tuple(map(key, name.split("."))): nnx.Param(value) for name, value in params.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _matrix_axes(name: str) -> MuonDimensionNumbers | None:
    """Which axes of a kernel Muon sees as a matrix; gate and up are two matrices, and each expert has its own. None:
    not a hidden matrix."""
    if name.endswith("qkv.kernel"):
        return MuonDimensionNumbers((3,), (0, 1, 2))
    if name.endswith("attention.o.kernel"):
        return MuonDimensionNumbers((1, 2, 3), (0,))
    if name.endswith("gate_up.kernel"):
        return MuonDimensionNumbers((-1,), (-3,))
    if name.endswith("down.kernel"):
        return MuonDimensionNumbers((-1,), (-2,))
    return None


def _all_matrix_axes(params: Params) -> dict[str, MuonDimensionNumbers | None]:
    return {name: _matrix_axes(name) for name in params}


def schedule(config: TrainingConfig, peak: float) -> optax.Schedule:
    """Warm-up, constant, linear decay to zero."""
    decay_steps = int(config.steps * config.decay)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, config.warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay_steps),
        ],
        [config.warmup, config.steps - decay_steps],
    )


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for hidden matrices and AdamW for embeddings and norms, or AdamW for all."""
    other = schedule(config, config.other_rate)
    if config.optimizer == "adamw":
        chosen = optax.adamw(other, b1=0.9, b2=0.95, weight_decay=config.weight_decay)
    else:
        chosen = muon(
            schedule(config, config.matrix_rate),
            beta=0.95,
            weight_decay=config.weight_decay,
            adam_b2=0.95,
            adam_learning_rate=other,
            muon_weight_dimension_numbers=_all_matrix_axes,  # pyright: ignore[reportArgumentType]
        )
    return optax.chain(optax.clip_by_global_norm(1.0), chosen)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowsAttend:
    """An `Attend` of the documents in rows, whose tokens come flattened; gives their keys and values."""

    documents: jax.Array  # int32 [rows, length]

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        q, k, v = (x.reshape(*self.documents.shape, *x.shape[1:]) for x in rotate(heads))
        out = causal_attention(q, k, v, self.documents)
        return out.reshape(-1, *out.shape[2:]), (k, v)


def row_losses(graph: nnx.GraphDef, params: Params, rows: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of the next-token losses in nats, and the sum of the weights. Arrays are [rows, length]."""
    model = module_of(graph, params)
    logits = model.logits(hidden_of(model, rows))  # pyright: ignore[reportAttributeAccessIssue]
    targets = jnp.roll(rows["ids"], -1, axis=1).reshape(-1)
    weights = weights_of_next(rows)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * weights), jnp.sum(weights)


def hidden_of(model: nnx.Module, rows: dict[str, jax.Array]) -> jax.Array:
    """The hidden states of all tokens of packed rows, [rows * length, hidden].

    Tokens are flattened for all but attention: XLA's CPU products of matrices are faster than those of higher ranks.
    """
    return model(rows["ids"].reshape(-1), rows["positions"].reshape(-1), RowsAttend(rows["documents"]))  # pyright: ignore[reportCallIssue]


def weights_of_next(rows: dict[str, jax.Array]) -> jax.Array:
    """For each token of packed rows the weight of predicting the one after it, [rows * length]."""
    return jnp.roll(rows["weights"], -1, axis=1).at[:, -1].set(0.0).reshape(-1)


def make_step(row_losses: RowLosses, optimizer: optax.GradientTransformation) -> Callable:
    """A jitted (params, state, groups of rows) -> (params, state, mean loss), which donates its first two arguments."""

    def mean_loss(params: Params, groups: list[dict[str, jax.Array]]) -> jax.Array:
        sums = [row_losses(params, rows) for rows in groups]
        return sum(total for total, _ in sums) / sum(weight for _, weight in sums)  # pyright: ignore

    def step(params: Params, state: optax.OptState, groups: list[dict[str, jax.Array]]) -> tuple:
        loss, gradients = jax.value_and_grad(mean_loss)(params, groups)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def make_evaluation(row_losses: RowLosses) -> Callable[[Params, Sequence[Rows]], float]:
    """A function that gives the mean loss in nats over rows, counting only weighted tokens."""
    sums = jax.jit(row_losses)

    def evaluate(params: Params, batches: Sequence[Rows]) -> float:
        found = [sums(params, rows.arrays()) for rows in batches]
        return float(sum(total for total, _ in found) / sum(weight for _, weight in found))  # pyright: ignore

    return evaluate


def train(
    row_losses: RowLosses,
    params: Params,
    batches: Iterator[list[Rows]],
    held_out: Sequence[Rows],
    config: TrainingConfig,
    history: History,
    report: Callable[[float, Params], None],
    every: int = 50,
) -> Params:
    """Run the schedule on a step's groups of rows after the other, and write `history`.

    `report(tokens per second, params)` is called every `every` steps, after the history has its newest losses. Raises
    FloatingPointError when the loss is not finite."""
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    step, evaluate = make_step(row_losses, optimizer), make_evaluation(row_losses)
    recent, recent_tokens, since = [], 0, time.perf_counter()
    for number in range(1, config.steps + 1):
        groups = next(batches)
        params, state, loss = step(params, state, [rows.arrays() for rows in groups])
        recent_tokens += sum(rows.tokens for rows in groups)
        recent.append(loss)
        if number % every and number != config.steps:
            continue
        mean = float(np.mean([float(value) for value in recent]))
        history.steps += len(recent)
        if not math.isfinite(mean):
            raise FloatingPointError(f"the loss is {mean} at step {history.steps}")
        seconds = time.perf_counter() - since
        history.tokens += recent_tokens
        history.seconds += seconds
        history.training_loss.append((history.steps, mean))
        history.held_out_loss.append((history.steps, evaluate(params, held_out)))
        report(recent_tokens / seconds, params)
        recent, recent_tokens, since = [], 0, time.perf_counter()
    return params


def batches_of[R: Rows](packer: Packer[R], config: TrainingConfig) -> Iterator[list[R]]:
    """Endless steps' groups of rows, in the sizes of `config`."""
    number = 0
    while True:
        number += 1
        is_long = number % config.long_every == 0
        yield packer.step(config.long_groups if is_long else config.groups)
