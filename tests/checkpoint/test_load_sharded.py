"""Loading onto four devices gives the model of one device, each device holding its share only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.checkpoint import convert_checkpoint
from tests.checkpoint.builders import tiny_config, write_checkpoint

ROOT = Path(__file__).parents[2]
# Devices are counted when JAX starts, so four of them need a process of their own.
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxinfer.attention.dense import CausalAttend
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.weight_map import parameters
from tests.checkpoint.builders import parameters_of

def hidden(model):
    # In double precision: in single, two orders of the same sums on one device already differ by 1e-4 in this model.
    with jax.enable_x64(True):
        graph, state = nnx.split(model)
        wide = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.float64), state))
        return np.asarray(jax.jit(lambda: wide(jnp.arange(12), jnp.arange(12), CausalAttend()))())

results = []
for path in sys.argv[1:]:
    whole_config, whole = load_checkpoint(path)
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    config, model = load_checkpoint(path, mesh=mesh)
    flat = parameters_of(model)
    shares = {}
    for parameter in parameters(config):
        leaf = model
        for name in parameter.path.split("."):
            leaf = leaf[int(name)] if name.isdigit() else getattr(leaf, name)
        shares[parameter.path] = [list(shard.data.shape) for shard in leaf[...].addressable_shards]
    same = config.num_kv_heads != whole_config.num_kv_heads or all(
        np.array_equal(flat[name], values) for name, values in parameters_of(whole).items())
    results.append({"devices": len(jax.devices()), "num_kv_heads": config.num_kv_heads, "shares": shares,
                    "same": bool(same), "difference": float(abs(hidden(model) - hidden(whole)).max())})
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_heads": 8, "head_dim": 6}
    paths = []
    for heads in (4, 2):
        config = tiny_config("Qwen2ForCausalLM", **sizes, num_kv_heads=heads)
        write_checkpoint(folder / f"hf{heads}", config)
        convert_checkpoint(folder / f"hf{heads}", folder / f"converted{heads}", progress=False)
        paths += [folder / f"hf{heads}", folder / f"converted{heads}"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(("hf4", "converted4", "hf2", "converted2"), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", ["hf4", "converted4", "hf2", "converted2"])
def test_four_devices_compute_what_one_computes(results, name):
    assert results[name]["devices"] == 4
    assert results[name]["difference"] < 1e-5


@pytest.mark.parametrize("name", ["hf4", "converted4"])
def test_parameters_are_the_same_as_on_one_device(results, name):
    assert results[name]["same"] and results[name]["num_kv_heads"] == 4


@pytest.mark.parametrize("name", ["hf4", "converted4"])
def test_every_device_holds_a_quarter_of_what_is_split(results, name):
    shares = results[name]["shares"]
    assert shares["embed.embedding"] == [[10, 24]] * 4
    assert shares["layers.0.attention.qkv.kernel"] == [[1, 4, 6, 24]] * 4
    assert shares["layers.0.attention.qkv.bias"] == [[1, 4, 6]] * 4
    assert shares["layers.1.attention.o.kernel"] == [[24, 1, 2, 6]] * 4
    assert shares["layers.1.mlp.gate_up.kernel"] == [[8, 2, 24]] * 4
    assert shares["layers.1.mlp.down.kernel"] == [[24, 8]] * 4
    assert shares["final_norm.scale"] == [[24]] * 4


@pytest.mark.parametrize("name", ["hf2", "converted2"])
def test_with_two_key_value_heads_each_is_kept_by_two_devices(results, name):
    assert results[name]["num_kv_heads"] == 4
    assert results[name]["shares"]["layers.0.attention.qkv.kernel"] == [[1, 4, 6, 24]] * 4
    assert results[name]["shares"]["layers.1.attention.o.kernel"] == [[24, 1, 2, 6]] * 4
