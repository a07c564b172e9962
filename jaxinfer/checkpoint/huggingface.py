"""A Hugging Face directory as a source of whole parameters, assembled one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.dtypes import check_narrowed, parse_dtype
from jaxinfer.checkpoint.errors import CheckpointError, some_of
from jaxinfer.checkpoint.layout import Layout, layout_of
from jaxinfer.checkpoint.mxfp4 import SourceTensor, with_mxfp4
from jaxinfer.checkpoint.safetensors_reader import open_checkpoint
from jaxinfer.checkpoint.weight_map import Placement, match_sources, matching, placements, tied_copies
from jaxinfer.models.config import ModelConfig

logger = logging.getLogger(__name__)


class HuggingFaceWeights:
    """The parameters of `config`, from safetensors in `directory`.

    Opening checks names, shapes and files. Contents are read when a parameter is asked for, so that one parameter and
    one source tensor are in memory.

    Args:
        directory: holds `model.safetensors`, or shards and their index.
        config: the configuration that the parameters are checked against, or its layout.
        dtype: dtype of parameters without their own dtype; None for the dtype of the files.
        on_read: called after each source tensor with its number of bytes.

    Raises:
        CheckpointError: files are missing or damaged; tensors are missing, left over or of the wrong shape.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig | Layout,
        dtype: Any = None,
        on_read: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.directory = directory
        tensors = with_mxfp4(open_checkpoint(directory))
        layout = layout_of(config).stored_as(tensors)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        try:
            names = match_sources(shapes, layout)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        extra = matching(shapes, layout.left_out)
        if extra:
            logger.warning(
                "%s: %d tensors of parts that are not computed are left out: %s", directory, len(extra), some_of(extra)
            )
        self._parts: dict[str, list[tuple[Placement, SourceTensor]]] = {}
        for placement in placements(layout):
            tensor = tensors[names[placement.source]].rows(placement.taken)
            self._parts.setdefault(placement.target.path, []).append((placement, tensor))
        self.dtype = parse_dtype(dtype) or self._stored_dtype(layout)
        self._on_read = on_read
        for copy, original in tied_copies(shapes, layout).items():
            _check_equal(tensors[copy], tensors[original])

    @property
    def nbytes(self) -> int:
        """Bytes of all source tensors."""
        return sum(tensor.nbytes for parts in self._parts.values() for _, tensor in parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by its path."""
        return {target: parts[0][0].target.shape for target, parts in self._parts.items()}

    def dtype_of(self, target: str) -> np.dtype:
        """Dtype of a parameter: its own, or that of all weights."""
        return self._parts[target][0][0].target.dtype or self.dtype

    def read(self, target: str) -> np.ndarray:
        """Read the whole parameter into fresh memory.

        Raises:
            CheckpointError: a value does not fit into the requested dtype.
        """
        parts = self._parts[target]
        first, tensor = parts[0]
        dtype = self.dtype_of(target)
        if first.is_whole_as_stored and tensor.dtype == dtype:
            parameter = tensor.read().reshape(first.target.shape)
            self._on_read(tensor.nbytes)
            return parameter
        parameter = np.empty(first.target.shape, dtype)
        for placement, tensor in parts:
            with np.errstate(over="ignore"):  # reported below, with the tensor's name
                placement.store(tensor.read(), parameter)
            check_narrowed(parameter[placement.part], tensor.dtype, f"{tensor.name} in {tensor.file}")
            self._on_read(tensor.nbytes)
        return parameter

    def view(self, target: str, index: Any = ...) -> Callable[[Any], np.ndarray]:
        """Assemble a parameter; return a function that gives parts (a slice per axis) of what `index` selects of it."""
        parameter = self.read(target)[index]
        return lambda part: parameter[part]

    def _stored_dtype(self, layout: Layout) -> np.dtype:
        placed = (each for parts in self._parts.values() for each in parts)
        found = {tensor.dtype for placement, tensor in placed if placement.target.dtype is None}
        if len(found) > 1:
            # A parameter may come from several tensors, and a model has one dtype: the configuration decides.
            if layout.dtype is None:
                names = some_of(sorted(map(str, found)))
                raise CheckpointError(f"{self.directory} mixes {names} and config.json names no dtype; pass dtype")
            found = {parse_dtype(layout.dtype)}
        dtype = found.pop()
        if dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
            raise CheckpointError(f"{self.directory} stores {dtype} weights; pass dtype to convert them")
        return np.dtype(dtype)


def _check_equal(copy: SourceTensor, original: SourceTensor) -> None:
    same = copy.shape == original.shape and copy.dtype == original.dtype
    pieces = zip(copy.pieces(), original.pieces(), strict=True) if same else ()
    # Bytes, because a NaN differs from itself.
    if not same or any((a.view(np.uint8) != b.view(np.uint8)).any() for a, b in pieces):
        raise CheckpointError(
            f"embeddings and output head are tied, but {copy.name} in {copy.file} differs from {original.name}: "
            "one of the two would be ignored"
        )
