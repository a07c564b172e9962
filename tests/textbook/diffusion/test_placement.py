"""The textbook worker on a device that is named, and on a mesh of devices: the loop's tokens, where they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import RopeConfig
from jaxinfer.textbook.diffusion.placement import over_mesh
from jaxinfer.textbook.diffusion.worker import DiffusionWorker
from tests.builders import model_config, random_model
from tests.diffusion.builders import MASK
from tests.test_tensor_parallel import COMPILING, finish
from tests.textbook.diffusion.builders import WAYS, decoded

SCRIPT = Path(__file__).with_name("devices_worker.py")
ROOT = SCRIPT.parents[3]
WAY = "vicinity smoothed"
# Two of the families have fewer KV heads than there are devices, so that these are replicated.
DEVICES = {"LLaDA2MoeModelLM": 4, "LLaDAModelLM": 4, "LLaDAMoEModelLM": 2}


def config_of(family: str) -> ModelConfig:
    """A configuration that four devices can share."""
    partial = 0.5 if family == "LLaDA2MoeModelLM" else 1.0
    rope = RopeConfig(partial_rotary_factor=partial, max_position_embeddings=256, original_max_position_embeddings=256)
    blocks = {"block_size": 4} if family == "LLaDA2MoeModelLM" else {}
    more = {"vocab_size": 104, "mask_token_id": MASK, "num_layers": 2, "head_dim": 12, "rope": rope, **blocks}
    return model_config(family, **more)


def start(**given: Any) -> subprocess.Popen:
    """A process of four devices that denoises the batch."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(ROOT),
        **{name.upper(): str(jax.config.values[name]) for name in COMPILING},
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT), json.dumps(given)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def check(found: dict[str, Any], family: str, way: str) -> None:
    wanted = decoded(random_model(config_of(family), seed=5), WAYS[way])
    assert found["tokens"] == [each.tokens for each in wanted]
    assert found["iterations"] == [len(each.rounds) for each in wanted]
    logits = np.stack([each.rounds[0].logits for each in wanted])
    np.testing.assert_allclose(found["logits"], np.where(np.isfinite(logits), logits, 0), atol=2e-4)


@pytest.mark.parametrize("family", DEVICES)
def test_devices_that_share_a_model_denoise_as_the_loop_does(family, tmp_path):
    size = DEVICES[family]
    found = finish(start(family=family, way=WAY, size=size, directory=str(tmp_path / "model")))
    check(found["one"], family, WAY)
    assert found["one"]["devices"] == [f"cpu:{number}" for number in range(size)]
    assert found["one"]["shard"][2] == 1, "each device has one KV head"
    assert found["as loaded"] and all(found["as loaded"]), "a model in memory is sharded as one that is loaded"
    assert found["errors"] == [
        f"tp_size must be {size}, over which the model is sharded, or absent, got 1",
        f"device must be None for a model that is sharded over {size} devices, got 'cpu'",
    ]


def test_arrays_are_on_the_device_that_is_named():
    found = finish(start(family="LLaDAModelLM", way="dual", device="cpu:3"))
    for name in ("one", "same"):
        check(found[name], "LLaDAModelLM", "dual")
        assert found[name]["devices"] == ["cpu:3"]


def test_more_devices_than_there_are_and_uneven_shares_are_refused():
    model = random_model(model_config("LLaDAModelLM", mask_token_id=MASK))
    count = len(jax.devices())
    with pytest.raises(ValueError, match=f"tp_size={count + 1}, but there are {count} devices"):
        DiffusionWorker(SimpleNamespace(tp_size=count + 1), None, model=model)
    for bad in (0, True, "2"):
        with pytest.raises(ValueError, match="tp_size must be an integer of at least 1, got"):
            DiffusionWorker(SimpleNamespace(tp_size=bad), None, model=model)
    two = SimpleNamespace(size=2)
    with pytest.raises(ValueError, match="tp_size=2 does not split the model: .* does not divide vocab_size=101"):
        over_mesh(model, two)  # type: ignore[arg-type]
    assert DiffusionWorker(SimpleNamespace(tp_size=1), None, model=model).model is model


def test_a_mesh_without_the_axis_of_layers_is_refused():
    model = random_model(model_config("LLaDAModelLM", mask_token_id=MASK))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    graph, state = nnx.split(model)
    spread = nnx.merge(graph, jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())))
    with pytest.raises(ValueError, match="the mesh must have an axis 'tensor', got axes"):
        DiffusionWorker(None, None, model=spread)


def test_settings_that_ask_for_nothing_are_taken():
    model = random_model(model_config("LLaDAModelLM", mask_token_id=MASK))
    arguments = SimpleNamespace(tp_size=None, pp_size=None, ep_size=0)
    worker = DiffusionWorker(arguments, None, None, None, None, None, None, False, model=model, device=None)
    assert worker.model is model
