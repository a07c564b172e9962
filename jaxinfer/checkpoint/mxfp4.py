"""Tensors in MXFP4: numbers of 4 bits, 32 of which share a power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.safetensors_reader import StoredTensor

# Endings of the names of the two tensors that are stored for one.
BLOCKS, SCALES = "_blocks", "_scales"
# Neighbouring columns that share a scale, and the bytes that hold their codes.
GROUP, GROUP_BYTES = 32, 16
# The numbers of codes 0 to 7; codes 8 to 15 have the same ones with a minus.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_SCALE = 255
# With a greater scale, some numbers are too large for bfloat16.
_LARGEST_SAFE_SCALE = 252


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A bfloat16 tensor [experts, rows, columns] that is stored in MXFP4; it is read as a `StoredTensor` is.

    A byte of the blocks has the codes of two columns, the earlier one in its low half. An element is the number of its
    code times 2^(scale - 127).

    Attributes:
        blocks: uint8 [experts, rows, columns / 32, 16].
        scales: uint8 [experts, rows, columns / 32].

    Raises:
        CheckpointError: the dtypes or shapes are others.
    """

    blocks: StoredTensor
    scales: StoredTensor

    dtype: ClassVar[np.dtype] = np.dtype(ml_dtypes.bfloat16)

    def __post_init__(self) -> None:
        blocks, scales = self.blocks, self.scales
        if blocks.dtype != np.uint8 or len(blocks.shape) != 4 or blocks.shape[-1] != GROUP_BYTES:
            raise CheckpointError(
                f"{blocks.name} in {blocks.file} is {blocks.dtype} {list(blocks.shape)}, but blocks of MXFP4 are uint8 "
                f"[experts, rows, columns / {GROUP}, {GROUP_BYTES}]"
            )
        if scales.dtype != np.uint8 or scales.shape != blocks.shape[:-1]:
            raise CheckpointError(
                f"{scales.name} in {scales.file} is {scales.dtype} {list(scales.shape)}, but {blocks.name} asks for "
                f"uint8 {list(blocks.shape[:-1])}"
            )

    @property
    def name(self) -> str:
        return self.blocks.name

    @property
    def file(self) -> Path:
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, groups, _ = self.blocks.shape
        return (*lead, groups * GROUP)

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return self.blocks.nbytes + self.scales.nbytes

    def read(self) -> np.ndarray:
        """Read the tensor into fresh memory.

        Raises:
            CheckpointError: a scale is NaN, or a value is too large for bfloat16.
        """
        values = np.empty(math.prod(self.shape), self.dtype)
        start = 0
        for piece in self.pieces():
            values[start : start + piece.size] = piece
            start += piece.size
        return values.reshape(self.shape)

    def rows(self, part: slice | None) -> Mxfp4Tensor:
        """Return a slice of the experts as a tensor; None: the whole tensor."""
        return Mxfp4Tensor(self.blocks.rows(part), self.scales.rows(part))

    def pieces(self, max_bytes: int = 16 * 2**20) -> Iterator[np.ndarray]:
        """Yield the tensor's elements in order, flat, a bounded number at a time, but at least 32.

        Raises:
            CheckpointError: see `read`.
        """
        count, step = math.prod(self.scales.shape), max(1, max_bytes // (GROUP * self.dtype.itemsize))
        blocks, scales = replace(self.blocks, shape=(count, GROUP_BYTES)), replace(self.scales, shape=(count,))
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            yield self._elements(blocks.rows(part).read(), scales.rows(part).read())

    def _elements(self, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the elements of N groups, flat, from blocks uint8 [N, 16] and scales uint8 [N]."""
        pairs = _pairs()[(scales.astype(np.uint16) << 8)[:, None] | blocks]
        elements = pairs.view(self.dtype).reshape(-1)
        largest = scales.max()
        if largest > _LARGEST_SAFE_SCALE and not np.isfinite(elements).all():
            reason = "is NaN" if largest == _NAN_SCALE else "makes values too large for bfloat16"
            raise CheckpointError(f"a scale of {self.name} in {self.scales.file} {reason}: it is {largest}")
        return elements


type SourceTensor = StoredTensor | Mxfp4Tensor


def with_mxfp4(tensors: Mapping[str, StoredTensor]) -> dict[str, SourceTensor]:
    """Return the tensors with one entry, called NAME_blocks, in place of each pair NAME_blocks and NAME_scales.

    Raises:
        CheckpointError: one of a pair is missing, or their dtypes or shapes do not fit.
    """
    found: dict[str, SourceTensor] = {**tensors}
    for name, tensor in tensors.items():
        if name.endswith(BLOCKS):
            found[name] = Mxfp4Tensor(tensor, _partner(tensors, tensor, BLOCKS, SCALES))
        elif name.endswith(SCALES):
            _partner(tensors, tensor, SCALES, BLOCKS)
            del found[name]
    return found


def _partner(tensors: Mapping[str, StoredTensor], tensor: StoredTensor, ending: str, other: str) -> StoredTensor:
    """Return the other tensor of a pair, whose name has another ending."""
    name = tensor.name.removesuffix(ending) + other
    if name not in tensors:
        raise CheckpointError(f"{tensor.name} in {tensor.file} is half of an MXFP4 tensor: {name} is missing")
    return tensors[name]


@cache
def _pairs() -> np.ndarray:
    """Return uint32 [65536]: for each scale * 256 + byte two bfloat16 elements, as they follow each other in memory.

    Every element is exact in bfloat16 or too large for it. A number has at most two significant bits. The smallest
    elements are subnormal: with scale 0 they are multiples of 2^-128, and bfloat16 has the multiples of 2^-133.
    """
    numbers = np.array([sign * magnitude for sign in (1.0, -1.0) for magnitude in _MAGNITUDES])
    exact = np.ldexp(numbers, np.arange(256)[:, None] - 127)
    exact[_NAN_SCALE] = np.nan
    with np.errstate(over="ignore"):  # reported where such an element is read
        elements = exact.astype(Mxfp4Tensor.dtype)
    byte = np.arange(256)
    pairs = np.stack([elements[:, byte % 16], elements[:, byte // 16]], axis=-1)
    return pairs.reshape(-1, 2).view(np.uint32).reshape(-1)
