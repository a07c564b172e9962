"""Parameters in an Orbax checkpoint: written one at a time, restored straight onto devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxinfer.checkpoint.errors import CheckpointError

# A chunk is the least that a device reads of an array, and the most that is encoded at a time.
CHUNK_BYTES = 32 * 2**20


class ParameterSource(Protocol):
    """Parameters that are made when they are asked for."""

    dtype: np.dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, target: str) -> np.ndarray: ...


class _Pending:
    """A leaf that is not in memory yet; it has what Orbax asks of an array before it writes one."""

    def __init__(self, source: ParameterSource, target: str) -> None:
        self.source, self.target = source, target
        self.shape, self.dtype = source.shapes[target], source.dtype
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize


class _PendingHandler(ocp.type_handlers.NumpyHandler):
    """Writes pending leaves one after the other, so that one at a time is in memory."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> list:
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            for written in await super().serialize([value.source.read(value.target)], [info], [arg]):
                written.result()
        return []


def save_parameters(path: Path, source: ParameterSource) -> None:
    """Write every parameter of `source` to a new Orbax checkpoint at `path`; one at a time is read and held."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Pending, _PendingHandler()), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    tree = nest({target: _Pending(source, target) for target in source.shapes})
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=chunks))


def restore_parameters(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The parameters at `path`, each with the dtype and the sharding of its entry in `wanted`.

    Every device's share is read by itself; an array is never whole on the host unless a device holds it whole.

    Raises:
        CheckpointError: a parameter is missing, superfluous, damaged, or has another shape.
    """
    tree = nest(wanted)
    args = ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(path.absolute(), args=args)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete; convert the source again ({error})") from error
    return flatten(restored)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nest`."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat.update(flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value})
    return flat
