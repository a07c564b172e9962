"""A head on four devices is the head of one device, each device holding its share of attention and MLP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.checkpoint import convert_checkpoint
from tests.checkpoint.heads import DIM, head_config, head_tensors, write_head

ROOT = Path(__file__).parents[2]
QUERIES, INNER, HIDDEN = 8, 32, 22
# Devices are counted when JAX starts, so four of them need a process of their own.
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxinfer.attention.dense import CausalAttend
from jaxinfer.checkpoint import load_head
from tests.checkpoint.heads import TARGET

def logits(head):
    with jax.enable_x64(True):
        graph, state = nnx.split(head)
        wide = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype != jnp.int32 else x, state))
        rng = np.random.default_rng(0)
        embedded, features = rng.standard_normal((12, 22)), rng.standard_normal((12, 66))
        run = lambda: wide(embedded, wide.project(features), jnp.arange(12), CausalAttend())
        return np.asarray(wide.logits(jax.jit(run)().normed))

mesh = Mesh(np.array(jax.devices()), ("tensor",))
results = []
for path in sys.argv[1:]:
    whole, head = load_head(path, TARGET), load_head(path, TARGET, mesh=mesh)
    flat = {".".join(map(str, p)): leaf[...] for p, leaf in nnx.to_flat_state(nnx.state(head))}
    shares = {name: [list(shard.data.shape) for shard in value.addressable_shards] for name, value in flat.items()}
    results.append({"kv_heads": head.config.layer.num_kv_heads, "shares": shares,
                    "ids": bool((np.asarray(head.target_ids[...]) == np.asarray(whole.target_ids[...])).all()),
                    "difference": float(abs(logits(head) - logits(whole)).max())})
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    rng, paths = np.random.default_rng(1), []
    for kv_heads in (4, 2):
        config = head_config(num_attention_heads=QUERIES, num_key_value_heads=kv_heads, intermediate_size=INNER)
        attention = {"q_proj": (QUERIES * DIM, 2 * HIDDEN), "o_proj": (HIDDEN, QUERIES * DIM)}
        attention |= {f"{x}_proj": (kv_heads * DIM, 2 * HIDDEN) for x in "kv"}
        mlp = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
        named = {f"self_attn.{name}": shape for name, shape in attention.items()}
        named |= {f"mlp.{name}": shape for name, shape in mlp.items()}
        tensors = head_tensors() | {
            f"midlayer.{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in named.items()
        }
        write_head(folder / f"hf{kv_heads}", config, tensors)
        convert_checkpoint(folder / f"hf{kv_heads}", folder / f"converted{kv_heads}", progress=False)
        paths += [folder / f"hf{kv_heads}", folder / f"converted{kv_heads}"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip((path.name for path in paths), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", ["hf4", "converted4", "hf2", "converted2"])
def test_four_devices_draft_what_one_drafts(results, name):
    assert results[name]["difference"] < 1e-9 and results[name]["ids"]


@pytest.mark.parametrize("name", ["hf4", "converted4", "hf2", "converted2"])
def test_attention_and_mlp_are_split_and_the_rest_is_whole(results, name):
    shares = results[name]["shares"]
    # With two key/value heads each is kept by two devices.
    assert results[name]["kv_heads"] == 4
    assert shares["attention.qkv.kernel"] == [[1, 4, DIM, 2 * HIDDEN]] * 4
    assert shares["attention.o.kernel"] == [[HIDDEN, 1, 2, DIM]] * 4
    assert shares["mlp.gate_up.kernel"] == [[INNER // 4, 2, HIDDEN]] * 4
    assert shares["mlp.down.kernel"] == [[HIDDEN, INNER // 4]] * 4
    assert shares["fc.kernel"] == [[HIDDEN, 3 * HIDDEN]] * 4
    assert shares["lm_head.kernel"] == [[16, HIDDEN]] * 4
    assert shares["target_ids"] == [[16]] * 4
