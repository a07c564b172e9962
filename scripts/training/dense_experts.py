"""Small mixtures of experts in training: what they begin as, and all experts of all tokens computed at once.

With few small experts that is faster on a CPU than sorting tokens, and it has a gradient that is products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.attention.residual import Residual
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.experts_config import ExpertsConfig
from training.initialization import Params, random_parameters

BALANCE = 0.01
"""Weight of the loss that keeps experts equally busy: for each, how much more than its share it has, times the weights
that tokens give it (Fedus et al. 2021, Switch Transformers)."""


def with_experts(
    config: ModelConfig, model: DecoderLM, experts: ExpertsConfig, seed: int, **fields: object
) -> tuple[ModelConfig, nnx.GraphDef, Params]:
    """A mixture that says what a dense model says: its MLPs are what all tokens share, and experts add nothing yet.

    Its first layers, as many as it has more than the dense model, are new: they add nothing either.

    Args:
        config, model: the dense model.
        experts: `shared_size` is at least the model's `intermediate_size`. What is more is zero, and stays so in
            training.
        fields: what else the mixture's configuration has other than the model's.
    """
    assert experts.shared_size >= config.intermediate_size
    mixture = replace(config, experts=experts, **fields)  # pyright: ignore[reportArgumentType]
    more = mixture.num_layers - config.num_layers
    graph, params = random_parameters(mixture, seed)
    taught = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    for name in params:
        source = name.replace(".mlp.shared.", ".mlp.")
        if name.startswith("layers."):
            _, number, part = source.split(".", 2)
            source = f"layers.{int(number) - more}.{part}"
            is_routed = mixture.is_sparse(int(number)) and ".mlp." in name and ".mlp.shared." not in name
            if int(number) < more or is_routed:
                continue
        value = taught[source]
        missing = [(0, wanted - there) for wanted, there in zip(params[name].shape, value.shape, strict=True)]
        params[name] = jnp.pad(value, missing)
    return mixture, graph, params


def _all_at_once(
    mixture: Callable[..., jax.Array], given: Sequence[jax.Array], gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """float32 [T, hidden]: every expert of every token, with a weight that is mostly 0. Gates are SiLU."""
    tokens, experts, weights = given
    num_experts, inner, _, hidden = gate_up.shape
    weights = _balanced(weights, experts, num_experts)
    of_expert = jnp.zeros((len(tokens), num_experts)).at[jnp.arange(len(tokens))[:, None], experts].add(weights)
    found = jnp.einsum("th,oh->to", tokens, gate_up.reshape(-1, hidden)).reshape(-1, num_experts, inner, 2)
    gated = jax.nn.silu(found[..., 0]) * found[..., 1] * of_expert[:, :, None]
    return jnp.einsum("ti,hi->th", gated.reshape(len(tokens), -1), jnp.moveaxis(down, 1, 0).reshape(hidden, -1))


DENSE_EXPERTS = Residual(over_experts=_all_at_once)


@jax.custom_vjp
def _identity(weights: jax.Array, gradient: jax.Array) -> jax.Array:
    """The weights; going back, `gradient` joins theirs."""
    return weights


def _forward(weights: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return weights, gradient


def _backward(gradient: jax.Array, above: jax.Array) -> tuple[jax.Array, jax.Array]:
    return above + gradient, jnp.zeros_like(gradient)


_identity.defvjp(_forward, _backward)


def _balanced(weights: jax.Array, experts: jax.Array, num_experts: int) -> jax.Array:
    """The weights [T, k] of tokens' experts, which balance those in training."""
    load = jnp.zeros(num_experts).at[experts.reshape(-1)].add(1.0) * num_experts / experts.size
    return _identity(weights, BALANCE / len(weights) * (load[experts] - 1.0))
