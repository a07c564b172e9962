"""The training step's forward pass: logits of the engine's model, with gradients that finite differences agree with."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.checkpoint import load_checkpoint, read_config
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import build_model
from jaxinfer.models.training import logits
from tests.builders import model_config, random_model, random_prompts
from tests.hf_fixtures import NAMES, REMOTE_NAMES, checkpoint_path, expected
from tests.oracle import next_token_logits

TOLERANCE = 1e-4
CHOOSES = re.compile(r"router\.bias$")  # experts are chosen by it, and weighted without


@functools.cache
def model_of(name: str) -> DecoderLM:
    return load_checkpoint(checkpoint_path(name), dtype="float32")[1]


# Every switch of layers, experts and rotations is in one of these.
OF_EACH_KIND = ("bailing_v2", "exaone4", "gemma4_e2b", "gpt_oss", "minimax_m2", "phi3_longrope", "laguna_element")
AUTOREGRESSIVE = [
    name for name in (*NAMES, *REMOTE_NAMES) if read_config(checkpoint_path(name))[1].mask_token_id is None
]


def batch(lengths: list[int], width: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, positions and segments [1, width] of packed sequences, and padding after them."""
    tokens, positions, segments = (np.zeros((1, width), np.int32) for _ in range(3))
    start = 0
    for number, prompt in enumerate(random_prompts(lengths, vocab_size=vocab), start=1):
        part = slice(start, start + len(prompt))
        tokens[0, part], positions[0, part], segments[0, part] = prompt, np.arange(len(prompt)), number
        start += len(prompt)
    return tokens, positions, segments


@pytest.mark.parametrize("name", AUTOREGRESSIVE)
def test_logits_are_those_of_transformers(name):
    model, recorded = model_of(name), expected(name)
    ids = jnp.asarray(recorded.prompts[-1], jnp.int32)
    lengths = jnp.full(len(ids), len(ids)) if model.config.rope.depends_on_length else None  # all of it is the prompt
    found = logits(model, ids, jnp.arange(len(ids)), lengths=lengths)
    assert np.abs(np.asarray(found) - recorded.longest_logits).max() < TOLERANCE


def mean_logprob(model: DecoderLM, tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray, **options: bool):
    found = logits(model, tokens[:, :-1], positions[:, :-1], segments[:, :-1], **options)
    after = jnp.take_along_axis(jax.nn.log_softmax(found), tokens[:, 1:, None], axis=-1)[..., 0]
    is_one = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.sum(jnp.where(is_one, after, 0.0)) / is_one.sum()


def paths_of(state: nnx.State) -> list[str]:
    return [".".join(str(key.key) for key in path if hasattr(key, "key"))
            for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]  # fmt: skip


@pytest.mark.optimized
@pytest.mark.parametrize(
    "name", [name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.slow) for name in AUTOREGRESSIVE]
)
def test_gradients_are_those_of_finite_differences(name):
    graph, state = nnx.split(model_of(name))
    packed = batch([9, 6], 18, min(model_of(name).config.vocab_size, 60))

    @jax.jit
    def loss(state: nnx.State) -> jax.Array:
        return mean_logprob(nnx.merge(graph, state), *packed)

    gradient = jax.jit(jax.grad(loss))(state)
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(state)
    for number, (path, leaf, own) in enumerate(zip(paths_of(state), leaves, jax.tree.leaves(gradient), strict=True)):
        # Along the gradient of each leaf and a random direction; a gradient that is lost has a random one alone.
        size = float(jnp.linalg.norm(own))
        noise = rng.standard_normal(leaf.shape).astype(np.float32) / np.sqrt(leaf.size)
        direction = noise if size == 0 else own / size + 0.5 * noise
        step = 2e-3 * max(1.0, float(jnp.linalg.norm(leaf)) / np.sqrt(leaf.size)) / max(1.0, size)
        if "router" in path:
            step = 1e-6 if CHOOSES.search(path) else 5e-5  # a greater one changes which experts are chosen

        def moved(by: float, number: int = number, direction: jax.Array = direction) -> float:
            changed = [*leaves]
            changed[number] = leaves[number] + by * direction
            return float(loss(jax.tree.unflatten(tree, changed)))

        found, wanted = (moved(step) - moved(-step)) / (2 * step), float(jnp.vdot(own, direction))
        if CHOOSES.search(path):
            assert size == 0, (path, size)
            continue
        rounding = 4e-7 / step  # of a loss of a few units, in float32
        assert abs(found - wanted) < 0.05 * abs(wanted) + rounding, (path, found, wanted, rounding)


@pytest.mark.parametrize("remat", [False, True])
def test_packed_sequences_do_not_see_each_other(remat):
    model = random_model(model_config(num_layers=2))
    tokens, positions, segments = batch([9, 6], 18, 101)
    found = np.asarray(logits(model, *map(jnp.asarray, (tokens, positions, segments)), remat=remat))
    for start, length in ((0, 9), (9, 6)):
        own = tokens[0, start : start + length].tolist()
        for place in range(length):
            alone = next_token_logits(model, own[: place + 1])
            np.testing.assert_allclose(found[0, start + place], alone, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3_yarn_tied", "gemma4_e2b", "gpt_oss"])
def test_layers_that_are_computed_again_have_the_same_gradients_and_keep_less(name):
    model = model_of(name)
    graph, state = nnx.split(model)
    packed = batch([20, 10], 32, 60)

    def gradient(remat: bool):
        def loss(state: nnx.State) -> jax.Array:
            return mean_logprob(nnx.merge(graph, state), *packed, remat=remat)

        kept = jax.eval_shape(lambda state: jax.vjp(loss, state)[1], state)
        return jax.jit(jax.grad(loss))(state), sum(leaf.size for leaf in jax.tree.leaves(kept))

    (found, kept), (again, kept_again) = gradient(remat=False), gradient(remat=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, again)
    assert kept_again < kept


def test_longrope_reads_the_length_of_a_sequence_and_not_of_its_row():
    name = next(name for name in NAMES if model_of(name).config.rope.turning_length is not None)
    model = model_of(name)
    turning = model.config.rope.turning_length
    assert turning is not None
    tokens, positions, segments = batch([turning - 4, turning + 8], 2 * turning + 8, 60)
    found = np.asarray(logits(model, *map(jnp.asarray, (tokens, positions, segments))))[0]
    for part in (slice(0, turning - 4), slice(turning - 4, 2 * turning + 4)):
        alone = logits(model, jnp.asarray(tokens[:, part]), jnp.asarray(positions[:, part]))[0]
        np.testing.assert_allclose(found[part], alone, atol=TOLERANCE)


def test_a_diffusion_model_is_refused():
    config = model_config("LLaDAModelLM", mask_token_id=100)
    with pytest.raises(ValueError, match="is a diffusion model"):
        logits(build_model(config, rngs=nnx.Rngs(0)), jnp.zeros(4, jnp.int32), jnp.arange(4))
