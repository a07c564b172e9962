"""Logits of every family of mixtures against the one in NumPy that was written from their specification."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.checkpoint import load_checkpoint
from tests.diffusion.oracle import BlockAttend
from tests.hf_fixtures import checkpoint_path
from tests.models.mixture_numpy import logits_of
from tests.speculative.decoder_numpy import Checkpoint

NAMES = ("qwen3_moe", "qwen3_moe_mixed", "bailing_v1", "bailing_v2", "llada2")
IDS = [(37 * i + 11) % 120 for i in range(29)]


def stored(name: str) -> Checkpoint:
    folder = checkpoint_path(name)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return Checkpoint(json.loads((folder / "config.json").read_text()), tensors)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_numpy(name):
    config, model = load_checkpoint(checkpoint_path(name), dtype="float32")
    ids = jnp.asarray(IDS)
    attend = CausalAttend() if config.block_size is None else BlockAttend(config.block_size)
    logits = model.logits(model(ids, jnp.arange(len(IDS)), attend))
    np.testing.assert_allclose(logits, logits_of(stored(name), IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3_moe_mixed", "norm_topk_prob", True),
        ("bailing_v1", "norm_head", False),
        ("bailing_v2", "partial_rotary_factor", 1.0),
        ("bailing_v2", "topk_group", 4),
        ("bailing_v2", "routed_scaling_factor", 1.0),
        ("llada2", "block_size", 1),
        ("llada2", "num_shared_experts", 0),
        ("llada2", "num_experts_per_tok", 3),
    ],
)
def test_every_field_changes_them(name, field, value):
    config, tensors = stored(name)
    assert config[field] != value
    changed = logits_of(Checkpoint({**config, field: value}, tensors), IDS)
    assert np.abs(changed - logits_of(Checkpoint(config, tensors), IDS)).max() > 1e-2
