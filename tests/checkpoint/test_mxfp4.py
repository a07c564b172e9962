"""Tensors in MXFP4: two 4-bit codes in a byte, and a power of two for every 32 of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.huggingface import HuggingFaceWeights
from jaxinfer.checkpoint.layout import layout_of
from jaxinfer.checkpoint.mxfp4 import Mxfp4Tensor, with_mxfp4
from jaxinfer.checkpoint.rows import Row
from jaxinfer.checkpoint.safetensors_reader import open_checkpoint
from tests.checkpoint.builders import tiny_config

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPERTS, ROWS, COLUMNS = 4, 3, 96


def stored(directory: Path, blocks: np.ndarray, scales: np.ndarray) -> Mxfp4Tensor:
    """The tensor "up" of a safetensors file."""
    save_file({"up_blocks": blocks, "up_scales": scales}, directory / "model.safetensors")
    [tensor] = with_mxfp4(open_checkpoint(directory)).values()
    assert isinstance(tensor, Mxfp4Tensor)
    return tensor


def one_group(directory: Path, codes: list[int], scale: int) -> Mxfp4Tensor:
    """A tensor of one expert, one row and the columns that share a scale; `codes` of neighbours, repeated."""
    pairs = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    blocks = np.resize(np.array(pairs, np.uint8), (1, 1, 1, 16))
    return stored(directory, blocks, np.full((1, 1, 1), scale, np.uint8))


def random_tensor(directory: Path) -> tuple[Mxfp4Tensor, np.ndarray]:
    """A tensor, and its elements by the definition, in float64."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (EXPERTS, ROWS, COLUMNS // 32, 16), np.uint8)
    scales = rng.integers(0, 253, (EXPERTS, ROWS, COLUMNS // 32), np.uint8)
    expected = np.empty((EXPERTS, ROWS, COLUMNS))
    for expert, row, column in np.ndindex(expected.shape):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        code = byte >> 4 if column % 2 else byte & 15
        expected[expert, row, column] = NUMBERS[code] * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
    return stored(directory, blocks, scales), expected


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of bfloat16, which tell zeros of both signs apart."""
    assert x.dtype == ml_dtypes.bfloat16
    return x.view(np.uint16)


def as_bfloat16(values) -> np.ndarray:
    """Values that bfloat16 has exactly."""
    found = np.asarray(values, np.float64).astype(ml_dtypes.bfloat16)
    assert np.array_equal(found.astype(np.float64), values)
    return found


def test_sixteen_codes_stand_for_sixteen_numbers(tmp_path):
    read = one_group(tmp_path, list(range(16)), scale=127).read()
    assert np.array_equal(bits(read), bits(as_bfloat16(2 * NUMBERS).reshape(1, 1, 32)))


def test_the_low_half_of_a_byte_is_the_earlier_column(tmp_path):
    blocks = np.full((1, 1, 1, 16), 0x72, np.uint8)
    blocks[..., 15] = 0xB4
    read = stored(tmp_path, blocks, np.full((1, 1, 1), 127, np.uint8)).read()
    assert read.ravel().tolist() == [1.0, 6.0] * 15 + [2.0, -1.5]


def test_a_scale_is_a_power_of_two_for_32_columns(tmp_path):
    blocks = np.full((1, 2, 2, 16), 0x53, np.uint8)
    read = stored(tmp_path, blocks, np.array([[[127, 128], [126, 117]]], np.uint8)).read()
    factors = np.repeat([[[1.0, 2.0], [0.5, 2.0**-10]]], 32, axis=-1)
    assert np.array_equal(read.astype(np.float64), factors * ([1.5, 3.0] * 32))


def test_the_smallest_scale_gives_subnormal_numbers_exactly(tmp_path):
    read = one_group(tmp_path, list(range(16)), scale=0).read()
    expected = np.ldexp(np.array(2 * NUMBERS), -127).reshape(1, 1, 32)
    assert np.array_equal(bits(read), bits(as_bfloat16(expected)))
    assert set(np.abs(read.astype(np.float64)).ravel()) == {abs(number) * 2.0**-127 for number in NUMBERS}


def test_the_largest_scale_that_every_number_can_have_is_exact(tmp_path):
    read = one_group(tmp_path, list(range(16)), scale=252).read()
    assert np.array_equal(bits(read), bits(as_bfloat16(np.ldexp(np.array(2 * NUMBERS), 125)).reshape(1, 1, 32)))


@pytest.mark.parametrize(("code", "scale"), [(5, 253), (3, 254), (8, 254)])
def test_larger_scales_are_exact_where_the_number_is_small_enough(tmp_path, code, scale):
    read = one_group(tmp_path, [code, 0], scale).read().astype(np.float64)
    assert np.unique(read[..., ::2]).tolist() == [np.ldexp(NUMBERS[code], scale - 127)]


@pytest.mark.parametrize(("code", "scale"), [(6, 253), (15, 253), (4, 254)])
def test_values_that_bfloat16_cannot_hold_are_refused(tmp_path, code, scale):
    tensor = one_group(tmp_path, [0, code], scale)
    with pytest.raises(CheckpointError, match=f"a scale of up_blocks in .* makes values too large .*: it is {scale}"):
        tensor.read()


@pytest.mark.parametrize("code", [0, 3])
def test_a_scale_that_is_nan_is_refused(tmp_path, code):
    tensor = one_group(tmp_path, [code, code], scale=255)
    with pytest.raises(CheckpointError, match="a scale of up_blocks in .*model.safetensors is NaN: it is 255"):
        tensor.read()


def test_a_tensor_has_the_elements_of_the_definition(tmp_path):
    tensor, expected = random_tensor(tmp_path)
    assert tensor.name == "up_blocks" and tensor.file == tmp_path / "model.safetensors"
    assert tensor.shape == (EXPERTS, ROWS, COLUMNS)
    assert tensor.nbytes == EXPERTS * ROWS * (COLUMNS // 2 + COLUMNS // 32)
    read = tensor.read()
    assert read.dtype == tensor.dtype == ml_dtypes.bfloat16
    assert np.array_equal(bits(read), bits(as_bfloat16(expected)))


@pytest.mark.parametrize("part", [slice(0, 1), slice(1, 3), slice(3, 4), slice(2, 2)])
def test_a_slice_takes_experts(tmp_path, part):
    tensor, expected = random_tensor(tmp_path)
    taken = tensor.rows(part)
    assert taken.shape == expected[part].shape
    assert np.array_equal(bits(taken.read()), bits(as_bfloat16(expected[part])))


def test_no_slice_is_the_whole_tensor(tmp_path):
    tensor, _ = random_tensor(tmp_path)
    assert tensor.rows(None) == tensor


@pytest.mark.parametrize("max_bytes", [1, 64, 300, 2**20])
def test_pieces_are_bounded_and_make_up_the_tensor(tmp_path, max_bytes):
    tensor, expected = random_tensor(tmp_path)
    pieces = list(tensor.pieces(max_bytes))
    assert max(piece.nbytes for piece in pieces) <= max(64, max_bytes)
    assert np.array_equal(bits(np.concatenate(pieces)), bits(as_bfloat16(expected).ravel()))


def test_only_pairs_are_replaced_wherever_their_halves_are(tmp_path):
    pair = {"up_blocks": np.zeros((1, 2, 1, 16), np.uint8), "up_scales": np.full((1, 2, 1), 127, np.uint8)}
    save_file({"a.weight": np.ones(3, np.float32), "up_scales": pair["up_scales"]}, tmp_path / "one.safetensors")
    save_file({"up_blocks": pair["up_blocks"], "b.bytes": np.ones(3, np.uint8)}, tmp_path / "two.safetensors")
    names = {"a.weight": "one", "up_scales": "one", "up_blocks": "two", "b.bytes": "two"}
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = open_checkpoint(tmp_path)
    found = with_mxfp4(tensors)
    assert found.keys() == {"a.weight", "up_blocks", "b.bytes"}
    assert found["a.weight"] is tensors["a.weight"] and found["b.bytes"] is tensors["b.bytes"]
    assert found["b.bytes"].read().tolist() == [1, 1, 1]
    assert np.array_equal(bits(found["up_blocks"].read()), np.zeros((1, 2, 32)))


@pytest.mark.parametrize(("half", "other"), [("up_blocks", "up_scales"), ("up_scales", "up_blocks")])
def test_a_missing_half_is_named(tmp_path, half, other):
    save_file({half: np.zeros((1, 2, 1, 16), np.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{half} in .* is half of an MXFP4 tensor: {other} is missing"):
        with_mxfp4(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("blocks", "scales", "reason"),
    [
        (np.zeros((2, 1, 16), np.uint8), np.zeros((2, 1), np.uint8), r"up_blocks in .* is uint8 \[2, 1, 16\]"),
        (np.zeros((1, 2, 1, 8), np.uint8), np.zeros((1, 2, 1), np.uint8), r"up_blocks in .* is uint8 \[1, 2, 1, 8\]"),
        (np.zeros((1, 2, 1, 16), np.float32), np.zeros((1, 2, 1), np.uint8), "up_blocks in .* is float32"),
        (np.zeros((1, 2, 1, 16), np.uint8), np.zeros((1, 2, 2), np.uint8), r"up_scales in .* is uint8 \[1, 2, 2\]"),
        (np.zeros((1, 2, 1, 16), np.uint8), np.zeros((2,), np.uint8), r"up_scales in .* is uint8 \[2\]"),
        (np.zeros((1, 2, 1, 16), np.uint8), np.zeros((1, 2, 1), np.float32), "up_scales in .* is float32"),
    ],
)
def test_halves_that_do_not_fit_are_named(tmp_path, blocks, scales, reason):
    save_file({"up_blocks": blocks, "up_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        with_mxfp4(open_checkpoint(tmp_path))


def test_a_parameter_is_read_from_its_pair(tmp_path):
    tensor, expected = random_tensor(tmp_path)
    sizes = {"e": EXPERTS, "x": ROWS, "h": COLUMNS}
    config = layout_of(tiny_config())
    rows = (Row("up_blocks", "up.kernel", "e x h -> e x h"), Row("up_blocks", "turned.kernel", "e x h -> e h x"))
    read = []
    for row in rows:
        layout = dataclasses.replace(
            config, rows=(row,), alternatives=(), sizes={**config.sizes, **sizes}, tied_copies=None
        )
        weights = HuggingFaceWeights(tmp_path, layout, on_read=read.append)
        assert weights.dtype == ml_dtypes.bfloat16 and weights.nbytes == tensor.nbytes
        kernel = weights.read(row.target)
        assert np.array_equal(bits(kernel if row is rows[0] else kernel.swapaxes(1, 2)), bits(as_bfloat16(expected)))
    assert read == [tensor.nbytes] * 2
