"""Initial parameters of the embedded checkpoint: heads that begin as copying heads, residual branches at zero.

A small model spends most of a short training before it finds out how to copy. The two kinds of heads that do it are
known: some write the identity of an earlier token beside each token, others look for the place where the present token
was the earlier one, and repeat the token there (Olsson et al. 2022, induction heads). Here they are built in from the
start, in the way of mimetic initialization (Trockman and Kolter 2023); training is free to change them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import build_model
from jaxinfer.models.rope import RopeConfig
from training.tokenizer import VOCAB_SIZE

Params = dict[str, jax.Array]
CONTEXT = 1024

EMBEDDING_SCALE = 0.3
"""Norm of a token's embedding. Read and written by the same table, a large one would be its own successor."""
CONSTANT = 0.15
"""The entry 0 of every embedding: what a head needs to look at a position whatever its token is."""
SHARPNESS = 1.6
"""Scale of q and k after their norms in the layers with built heads."""
WRITTEN = 0.025
"""Scale of what the built heads add to the residual, for about two thirds of an embedding's norm."""
POSITION_PAIRS = 5
"""Rotary pairs, fastest first, by which heads find an earlier position."""
CONTENT_PAIR = 14
"""First rotary pair by which tokens are matched: this one and slower ones hardly turn within a hundred tokens."""


def model_config(end_of_turn: int) -> ModelConfig:
    """Qwen3 with 8 layers, 8 heads over 4 KV heads of 64: the engine's tensor parallelism and kernels are served."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=256,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope=RopeConfig(max_position_embeddings=CONTEXT, original_max_position_embeddings=CONTEXT),
        tie_word_embeddings=True,
        qk_norm=True,
        eos_token_ids=(end_of_turn,),
        dtype="bfloat16",
    )


def initial_parameters(config: ModelConfig, seed: int) -> tuple[nnx.GraphDef, Params]:
    """The graph and a flat {name: array} of a random model with copying heads."""
    graph, params = random_parameters(config, seed)
    return graph, with_copying_heads(params, config, seed)


def random_parameters(config: ModelConfig, seed: int) -> tuple[nnx.GraphDef, Params]:
    """A random model whose residual branches start at zero and whose embeddings start small."""
    graph, state = nnx.split(build_model(config, rngs=nnx.Rngs(seed)))
    params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    for name in params:
        if name.endswith(("attention.o.kernel", "mlp.down.kernel")):
            params[name] = jnp.zeros_like(params[name])
    params["embed.embedding"] *= EMBEDDING_SCALE
    return graph, params


def with_copying_heads(params: Params, config: ModelConfig, seed: int) -> Params:
    """Parameters with built heads in layers 0 and 1, and an entry 0 of the residual that is the same for every token.

    Layer 0: one head each looks one, two and three tokens back. Layer 1: three heads look for a place after the same
    one, two and three tokens, and copy the token there.
    """
    arrays = {name: np.array(value, np.float32) for name, value in params.items()}
    for name in arrays:
        if name.endswith("qkv.kernel"):
            arrays[name][..., 0] = 0.0
    arrays["embed.embedding"][:, 0] = CONSTANT
    rng = np.random.default_rng(seed)
    basis = [_columns(rng, config.hidden_size, config.head_dim) for _ in range(2)]
    _look_back(arrays, config, basis[0])
    _find_and_copy(arrays, config, basis, rng)
    return {name: jnp.asarray(value) for name, value in arrays.items()}


def _columns(rng: np.random.Generator, hidden: int, dim: int) -> list[np.ndarray]:
    """hidden / dim matrices [hidden, dim], all columns orthonormal to each other and, but for one, without entry 0."""
    square = rng.normal(size=(hidden, hidden))
    square[0] = 0.0
    orthogonal, _ = np.linalg.qr(square)
    orthogonal[0] = 0.0
    return np.split(orthogonal, hidden // dim, axis=1)


def _look_back(arrays: dict[str, np.ndarray], config: ModelConfig, basis: list[np.ndarray]) -> None:
    """Heads of layer 0 that see the token 1, 2 or 3 places before and write its `basis[0]` as `basis[distance]`."""
    name, dim, half = "layers.0.attention", config.head_dim, config.head_dim // 2
    qkv, out = arrays[f"{name}.qkv.kernel"], arrays[f"{name}.o.kernel"]
    turns = config.rope.theta ** -(np.arange(POSITION_PAIRS) / half)
    group = config.group_size
    for distance in (1, 2, 3):
        head, member = divmod(distance - 1, group)
        query, key = np.zeros(dim), np.zeros(dim)
        key[:POSITION_PAIRS] = 1.0
        query[:POSITION_PAIRS] = np.cos(turns * distance)
        query[half : half + POSITION_PAIRS] = -np.sin(turns * distance)
        qkv[head, [member, group, group + 1]] = 0.0
        qkv[head, member, :, 0], qkv[head, group, :, 0] = query, key
        qkv[head, group + 1] = basis[0].T
        out[:, head, member] = WRITTEN * basis[distance]
    _sharpen(arrays, name)


def _find_and_copy(
    arrays: dict[str, np.ndarray], config: ModelConfig, basis: list[list[np.ndarray]], rng: np.random.Generator
) -> None:
    """Heads of layer 1: `length` tokens up to here are compared with as many before each other place."""
    name, half, group = "layers.1.attention", config.head_dim // 2, config.group_size
    qkv, out = arrays[f"{name}.qkv.kernel"], arrays[f"{name}.o.kernel"]
    slots = np.concatenate([np.arange(CONTENT_PAIR, half), np.arange(half + CONTENT_PAIR, 2 * half)])
    identities, copied = basis
    mixes = [np.linalg.qr(rng.normal(size=(len(slots), len(slots))))[0] for _ in range(3)]
    for length in (1, 2, 3):
        head = length - 1
        query, key = (np.zeros((config.hidden_size, config.head_dim)) for _ in range(2))
        for back in range(length):
            query[:, slots] += identities[back][:, : len(slots)] @ mixes[back]
            key[:, slots] += identities[back + 1][:, : len(slots)] @ mixes[back]
        qkv[head, 0], qkv[head, group], qkv[head, group + 1] = query.T, key.T, copied[head].T
        out[:, head, 0] = WRITTEN * copied[head]
    _sharpen(arrays, name)


def _sharpen(arrays: dict[str, np.ndarray], name: str) -> None:
    for norm in ("q_norm", "k_norm"):
        arrays[f"{name}.{norm}.scale"] *= SHARPNESS
