"""Tracing and lowering do not grow with depth: a step is planned once, and one traced and lowered layer serves all."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.backend import AttentionBackend, select_backend
from jaxinfer.attention.tensor_parallel import over_devices
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, unpack
from jaxinfer.programs.forward import forward
from tests.builders import model_config, random_model

pytestmark = pytest.mark.optimized

SHAPE = BatchShape(decode_rows=4, prefill_rows=2, prefill_tokens=12, pages_per_row=4)


def lowered(layers: int, backend: AttentionBackend, calls: int = 1) -> str:
    """The program of one forward pass, or several in a row, before XLA has it."""
    config = model_config(num_layers=layers)
    model = random_model(config)
    cache = KVPool.shapes(config, num_pages=8, page_size=4, dtype=jnp.dtype(jnp.float32))
    buffer = jax.ShapeDtypeStruct(PackedBatch(SHAPE).buffer.shape, jnp.int32)

    def run(cache, buffer):
        for _ in range(calls):
            cache, hidden = forward(model, cache, unpack(buffer, SHAPE), backend)
        return cache, hidden

    return jax.jit(run).lower(cache, buffer).as_text()


def counting(backend: AttentionBackend) -> tuple[AttentionBackend, dict[str, int]]:
    """The backend, and how often each of its functions was traced."""
    counts = {"plan": 0, "attention": 0, "rotate_and_write": 0}

    def counted(name: str):
        function = getattr(backend, name)

        def run(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return run

    return replace(backend, **{name: counted(name) for name in counts}), counts


@pytest.mark.parametrize("name", ["xla", "pallas"])
def test_a_step_of_any_depth_is_planned_once_and_one_layer_is_traced(name):
    for layers in (3, 7):
        backend, counts = counting(select_backend(name))
        lowered(layers, backend)
        assert counts == {"plan": 1, "attention": 1, "rotate_and_write": 1}


def test_another_step_of_the_same_shape_is_planned_anew_and_not_traced_again():
    backend, counts = counting(select_backend("xla"))
    lowered(3, backend, calls=2)
    assert counts == {"plan": 2, "attention": 1, "rotate_and_write": 1}


@pytest.mark.parametrize("devices", [None, 1])
def test_the_functions_of_a_lowered_step_are_as_many_at_any_depth(devices):
    mesh = None if devices is None else jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    few, many = (lowered(layers, over_devices(select_backend("xla"), mesh)).count("func.func") for layers in (3, 7))
    assert few == many
