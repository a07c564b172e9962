"""Reader of safetensors files, one tensor at a time; each file is checked before anything is read from it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.errors import CheckpointError, some_of

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER = 100 * 2**20  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor's bytes: `offset` counts from the start of `file`."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Read the tensor into fresh memory: a mapped file would keep every touched page resident."""
        return self._read(0, math.prod(self.shape)).reshape(self.shape)

    def rows(self, part: slice | None) -> StoredTensor:
        """Return a slice of the first axis as a tensor; None: the whole tensor."""
        if part is None:
            return self
        shape = (part.stop - part.start, *self.shape[1:])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, shape=shape, offset=self.offset + part.start * row_bytes)

    def pieces(self, max_bytes: int = 16 * 2**20) -> Iterator[np.ndarray]:
        """Yield the tensor's elements in order, flat, a bounded number at a time."""
        count, step = math.prod(self.shape), max(1, max_bytes // self.dtype.itemsize)
        for start in range(0, count, step):
            yield self._read(start, min(step, count - start))

    def _read(self, start: int, count: int) -> np.ndarray:
        values = np.fromfile(self.file, self.dtype, count, offset=self.offset + start * self.dtype.itemsize)
        if values.size != count:
            raise CheckpointError(f"{self.file} is shorter than when it was opened: {self.name} cannot be read")
        return values


def open_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a Hugging Face directory by name, from one file or from the shards that the index lists.

    Raises:
        CheckpointError: no safetensors, only pickle files, a missing shard, or a truncated or corrupt file.
    """
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE)
    if (directory / INDEX_FILE).is_file():
        return _open_shards(directory)
    names = sorted(entry.name for entry in directory.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(
            f"{directory} holds its weights as pickle files only ({some_of(pickles)}), which can run code when they "
            "are opened and are refused; save the model as safetensors, where torch is installed: "
            f"safetensors.torch.save_file(torch.load({pickles[0]!r}, weights_only=True), {SINGLE_FILE!r})"
        )
    raise CheckpointError(f"{directory} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _open_shards(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX_FILE
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index with a weight_map: {error}") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} names {shard!r}, which is not a file of its own directory")
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {some_of(missing)}, which {INDEX_FILE} lists")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_header(directory / shard).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in both {tensors[name].file} and {tensor.file}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{index} says that {name} is in {shard}, but it is not there")
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name; check that its header accounts for every byte.

    Raises:
        CheckpointError: the file is truncated or too long, or its header is damaged.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if length < 2 or length > _MAX_HEADER or 8 + length > size:
            raise CheckpointError(f"{file} is truncated or not a safetensors file ({size} bytes)")
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"))
        header.pop("__metadata__", None)
        tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has a corrupt header: {error}") from error
    _check_extent(file, size, 8 + length, tensors)
    return tensors


def _entry(file: Path, name: str, entry: Mapping, data: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{file}: {name} has dtype {entry['dtype']}, which is not supported; supported: {', '.join(DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    tensor = StoredTensor(name, file, DTYPES[entry["dtype"]], tuple(entry["shape"]), data + begin)
    if end - begin != tensor.nbytes or begin < 0 or any(extent < 0 for extent in tensor.shape):
        raise CheckpointError(f"{file} has a corrupt header: {name} does not fill its {end - begin} bytes")
    return tensor


def _check_extent(file: Path, size: int, data: int, tensors: Mapping[str, StoredTensor]) -> None:
    """Check that the tensors are contiguous from the end of the header to the end of the file."""
    expected = data
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != expected:
            raise CheckpointError(f"{file} has a corrupt header: {tensor.name} overlaps or leaves a gap")
        expected += tensor.nbytes
    if expected != size:
        kind = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(f"{file} is {kind}: {size} bytes where {expected} are expected")
