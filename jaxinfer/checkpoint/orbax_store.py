"""Parameters in an Orbax checkpoint: written one at a time, read shard by shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from jaxinfer.checkpoint.dtypes import narrow, parse_dtype
from jaxinfer.checkpoint.errors import CheckpointError, some_of
from jaxinfer.checkpoint.weight_map import Parameter

# Size of a chunk, the least that can be read of an array.
CHUNK_BYTES = 16 * 2**20
# Parameters are written one by one, or this many bytes of smaller ones together.
WRITE_BYTES = 16 * 2**20


class ParameterSource(Protocol):
    """Parameters that are assembled on demand."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def dtype_of(self, target: str) -> np.dtype: ...

    def read(self, target: str) -> np.ndarray: ...


def save_parameters(path: Path, source: ParameterSource) -> None:
    """Write every parameter of `source` to a new Orbax checkpoint at `path`; few are in memory at a time.

    Weights are stored uncompressed: they hardly compress, and compression costs memory and time at every write and
    read.
    """
    import jax
    import orbax.checkpoint as ocp  # imported here: it is slow to import, and reading does not need it

    class Pending:
        """A leaf that is not in memory yet, with the attributes that Orbax reads before it writes an array."""

        def __init__(self, name: str) -> None:
            self.name, self.shape, self.dtype = name, source.shapes[name], source.dtype_of(name)
            self.ndim, self.size = len(self.shape), math.prod(self.shape)
            self.nbytes = self.size * self.dtype.itemsize

    class InTurn(ocp.type_handlers.NumpyHandler):
        """Handler that reads pending leaves, writes them, and waits before the next: one large or some small ones."""

        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> list[Any]:
            options = args or [ocp.SaveArgs()] * len(values)
            start = 0
            while start < len(values):
                end, nbytes = start + 1, values[start].nbytes
                while end < len(values) and nbytes + values[end].nbytes <= WRITE_BYTES:
                    nbytes += values[end].nbytes
                    end += 1
                arrays = [source.read(value.name) for value in values[start:end]]
                for written in await super().serialize(arrays, infos[start:end], options[start:end]):
                    written.result()
                del arrays
                start = end
            return []

    registry = ocp.type_handlers.create_type_handler_registry(
        (Pending, InTurn(deepcopy_host_arrays=False)), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    tree = _nest({name: Pending(name) for name in source.shapes})
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(tree, save_args=chunks))
    # Orbax's marker for file systems without rename would carry this machine's path into the checkpoint.
    (path / "commit_success.txt").unlink(missing_ok=True)


class StoredParameters:
    """The parameters of an Orbax checkpoint, as arrays of which any part can be read.

    Orbax stores arrays in TensorStore's formats (zarr in an OCDBT database, keys are tree paths). They are opened there
    directly: Orbax's own restore holds several arrays of a model on the host at once, and takes three times as long.

    Args:
        path: the checkpoint.
        parameters: the parameters that it must hold.
        dtype: dtype in which parameters without their own dtype are read; None for the dtype in which they are stored.

    Raises:
        CheckpointError: a parameter is missing, superfluous, damaged, or has another shape.
    """

    def __init__(self, path: Path, parameters: Sequence[Parameter], dtype: Any = None) -> None:
        self.path = path
        self._own_dtypes = {each.path: each.dtype for each in parameters}
        shapes = {each.path: each.shape for each in parameters}
        database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path.resolve()}/"}}
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        try:
            keys = ts.KvStore.open(database, context=context).result().list().result()
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged or incomplete; convert the source again ({error})") from error
        found = {key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")}
        missing, left = [name for name in shapes if name not in found], sorted(found - shapes.keys())
        if missing or left:
            lists = [
                f"{word}: {some_of(names)}" for word, names in (("missing", missing), ("left over", left)) if names
            ]
            raise CheckpointError(
                f"{path} does not hold the parameters of its configuration; convert the source again "
                f"({'; '.join(lists)})"
            )
        # zarr would read zeros where a chunk is missing.
        zarr = {"driver": "zarr", "fill_missing_data_reads": False}
        specs = {name: {**zarr, "kvstore": {**database, "path": f"{name}/"}} for name in shapes}
        opening = {name: ts.open(spec, open=True, read=True, context=context) for name, spec in specs.items()}
        self._arrays = {name: self._wait(name, future) for name, future in opening.items()}
        for name, array in self._arrays.items():
            if tuple(array.shape) != tuple(shapes[name]):
                raise CheckpointError(
                    f"{name} in {path} has shape {list(array.shape)}, "
                    f"but the configuration asks for {list(shapes[name])}"
                )
        weights = (array for name, array in self._arrays.items() if self._own_dtypes[name] is None)
        self.dtype = parse_dtype(dtype) or next(weights).dtype.numpy_dtype

    def view(self, name: str, index: Any = ...) -> Callable[[Any], np.ndarray]:
        """Return a function that reads any part (a slice per axis) of a parameter, or of what `index` selects of it.

        Raises:
            CheckpointError: on reading, if the parameter is damaged or does not fit into the dtype.
        """
        array = self._arrays[name][index]

        def read(part: Any) -> np.ndarray:
            stored = self._wait(name, array[part].read())
            return narrow(stored, self._own_dtypes[name] or self.dtype, f"{name} in {self.path}")

        return read

    def _wait(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{name} in {self.path} is damaged; convert the source again ({error})") from error


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted names: {"a.b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return tree
