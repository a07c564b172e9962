"""Safetensors files: read as the reference library writes them, and never believed when damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.safetensors_reader import open_checkpoint, read_header

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.float16),
    "c": np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "scalar": np.array(7, dtype=np.int64),
}


def raw_file(path: Path, header: dict[str, Any], data: bytes) -> Path:
    """A file with any header, right or wrong."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(directory: Path, weight_map: dict[str, Any]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_are_those_that_the_reference_library_wrote(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = open_checkpoint(tmp_path)
    assert tensors.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        read = tensors[name].read()
        assert read.dtype == values.dtype
        np.testing.assert_array_equal(read, values)


def test_pieces_are_bounded_and_make_up_the_tensor(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    pieces = list(read_header(tmp_path / "x.safetensors")["a"].pieces(max_bytes=20))
    assert [piece.size for piece in pieces] == [5, 5, 2]
    np.testing.assert_array_equal(np.concatenate(pieces), np.arange(12))


def test_shards_are_found_through_their_index(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    tensors = open_checkpoint(tmp_path)
    assert {name: tensor.file.name for name, tensor in tensors.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }


def test_a_single_file_wins_over_an_index(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"b": "gone.safetensors"})
    assert open_checkpoint(tmp_path).keys() == {"a"}


def test_a_missing_shard_is_named(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match="lacks two.safetensors"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(CheckpointError, match=r"says that b is in one.safetensors"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"a is in both .*one.safetensors and .*two.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", 3])
def test_an_index_cannot_point_outside_its_directory(tmp_path, name):
    write_index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="not a file of its own directory|lacks"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "{"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickle_files_are_refused_with_the_reason(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"pickle files only \({name}\).*can run code"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        open_checkpoint(tmp_path)


@given(cut=st.integers(min_value=0))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "shard.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(CheckpointError, match=r"shard.safetensors is truncated"):
        read_header(path)


def test_a_file_with_bytes_to_spare_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="longer than its header says"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, "b overlaps or leaves a gap"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, "b overlaps or leaves a gap"),
        ({"a": entry(0, 12, [2])}, "a does not fill its 12 bytes"),
        ({"a": entry(-12, 0, [3])}, "a does not fill its 12 bytes"),
        ({"a": entry(0, 12, [-1, -3])}, "a does not fill its 12 bytes"),
        ({"a": {"dtype": "F32", "shape": [3]}}, "'data_offsets'"),
        ({"a": entry(0, 12, "x")}, "corrupt header"),  # type: ignore[arg-type]
        ({"a": entry(0, 12, [12], "F8_E4M3")}, "a has dtype F8_E4M3, which is not supported"),
        ({"a": 3}, "corrupt header"),
        ([], "corrupt header"),
    ],
)
def test_a_header_that_does_not_account_for_the_data_is_refused(tmp_path, header, reason):
    path = raw_file(tmp_path / "x.safetensors", header, bytes(12))
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    assert str(path) in str(error.value) and reason in str(error.value)


@pytest.mark.parametrize("text", [b"not json at all!", b"\xff\xfe\xfd\xfc", b"{}"])
def test_a_header_that_is_no_json_object_or_describes_nothing_is_refused(tmp_path, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(CheckpointError, match=r"x.safetensors (has a corrupt header|is longer)"):
        read_header(path)


def test_a_header_length_beyond_the_limit_is_not_believed(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + bytes(100))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(path)


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": TENSORS["a"]}, path)
    tensor = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="is shorter than when it was opened: a"):
        tensor.read()
