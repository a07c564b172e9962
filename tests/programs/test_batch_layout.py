"""A step's host arrays travel to the device as one buffer and arrive bit for bit."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, StepBatch, unpack

SHAPES = [
    BatchShape(1, 0, 0, 1),
    BatchShape(8, 0, 0, 32),
    BatchShape(0, 4, 16, 5),
    BatchShape(4, 4, 64, 7),
    BatchShape(3, 0, 0, 9, decode_width=5, tail_words=1),
    BatchShape(2, 1, 16, 9, decode_width=6, num_logits=13),
    BatchShape(2, 3, 48, 9, decode_width=40, tail_words=3),
]


def random_batch(shape: BatchShape) -> PackedBatch:
    """Every bit of the buffer random: NaN payloads, negative integers and large unsigned ones among them."""
    packed = PackedBatch(shape)
    rng = np.random.default_rng(len(packed.buffer))
    packed.buffer[:] = rng.integers(-(2**31), 2**31, packed.buffer.shape)
    return packed


def arrays_of(batch: StepBatch) -> dict[str, jax.Array]:
    """Every array of a step by name, the sampling parameters among them."""
    nested = {
        f.name: getattr(owner, f.name)
        for owner in (batch, batch.samples, batch.samples.sampling)
        for f in dataclasses.fields(owner)
    }
    return {name: value for name, value in nested.items() if isinstance(value, jax.Array)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_array_arrives_on_the_device_bit_for_bit(shape):
    packed = random_batch(shape)
    batch = jax.jit(unpack, static_argnums=1)(packed.buffer, shape)
    arrays = arrays_of(batch)
    assert arrays.pop("first").shape == (0,)  # lower bounds are made on the device
    assert set(arrays) == set(shape.layout())
    for name, array in arrays.items():
        host, device = packed[name], np.asarray(array)
        if name == "page_branch" and not shape.is_branched:
            assert host.size == 0  # it stays on the device
            host = np.full_like(packed["page_table"], -1)
        assert (device.shape, device.dtype) == (host.shape, host.dtype), name
        assert np.array_equal(device.view(np.int32), host.view(np.int32)), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_views_tile_the_buffer(shape):
    packed = PackedBatch(shape)
    for mark, view in enumerate(map(packed.__getitem__, shape.layout()), start=1):
        assert np.array_equal(view.view(np.int32), np.zeros(view.shape, np.int32)), "two views share a word"
        view.view(np.int32)[...] = mark
    assert np.all(packed.buffer != 0)
    assert len(packed.buffer) == sum(math.prod(extent) for extent, _ in shape.layout().values())


def test_the_static_sizes_arrive_with_the_arrays():
    shape = SHAPES[-1]
    batch = unpack(jax.numpy.asarray(PackedBatch(shape).buffer), shape)
    assert (batch.decode_rows, batch.decode_width) == (2, 40)


def test_sizes_follow_from_rows_width_and_prefill_tokens():
    shape = BatchShape(2, 3, 48, 9, decode_width=40)
    assert (shape.num_tokens, shape.num_rows, shape.num_logits) == (2 * 40 + 48, 5, 5)


def test_a_step_can_want_logits_of_more_tokens_than_one_for_each_row():
    shape = BatchShape(2, 3, 48, 9, decode_width=40, num_logits=83)
    assert (shape.num_logits, shape.num_rows) == (83, 5)
    assert PackedBatch(shape)["logits_index"].shape == PackedBatch(shape)["temperature"].shape == (83,)


def test_a_shape_is_the_same_whether_one_logit_a_row_is_said_or_left_out():
    assert BatchShape(4, 2, 16, 9, num_logits=6) == BatchShape(4, 2, 16, 9)


def test_programs_of_different_shapes_have_different_descriptions():
    shapes = [*SHAPES, BatchShape(3, 0, 0, 9), BatchShape(3, 0, 0, 9, decode_width=5)]
    assert len({shape.describe() for shape in shapes}) == len(shapes)
    assert BatchShape(8, 2, 64, 32).describe() == "8 decodes and 64 prompt tokens in 2 rows, 32 pages a row"
