"""Conversion of a Hugging Face checkpoint to a directory that this engine loads straight onto a mesh."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from tqdm import tqdm

from jaxinfer.checkpoint.directory import (
    COMPANIONS,
    FORMAT_FILE,
    FORMAT_VERSION,
    WEIGHTS_FOLDER,
    find_checkpoint,
    is_converted,
)
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.checkpoint.eagle3 import layout_in
from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.huggingface import HuggingFaceWeights
from jaxinfer.checkpoint.orbax_store import save_parameters
from jaxinfer.models.unknown_fields import ConfigOptions


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: Any = None,
    revision: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **options: Unpack[ConfigOptions],
) -> Path:
    """Convert a Hugging Face checkpoint; the result holds Orbax weights, configuration, tokenizer and chat template.

    EAGLE-3 heads are converted too; their configuration tells them from models.

    One parameter and one source tensor are in memory at a time. The result is written beside `dst` under another name
    and renamed at the end, so that `dst` is either unchanged or complete.

    Args:
        src: a directory with safetensors, single or sharded, or a hub id.
        dst: the directory to make.
        dtype: dtype of the weights ("float32", "bfloat16", "float16"); None or "auto" keeps the source's.
        revision: branch, tag or commit of a hub id.
        overwrite: replace an existing `dst`.
        progress: show a progress bar.
        options: `ignore_config_fields` and `strict_config`, about unknown fields of the configuration, see
            `ConfigOptions`. The configuration is copied unchanged, so that loading the result needs them again.

    Returns:
        `dst` as a path.

    Raises:
        FileNotFoundError: `src` does not exist.
        FileExistsError: `dst` exists and is not to be overwritten, or another conversion is writing it.
        CheckpointError: the source is incomplete, damaged, of an unsupported kind or does not fit its configuration.
        UnsupportedConfigError: the source's configuration asks for something that the engine does not compute.
        ValueError: unknown `dtype`.
    """
    wanted = parse_dtype(dtype)
    source, target = find_checkpoint(src, revision), Path(dst).expanduser()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; choose another destination")
    if _in_use(target) and not overwrite:
        raise FileExistsError(f"{target} exists; choose another destination, or ask for it to be overwritten")
    if target.resolve() == source.resolve():
        raise FileExistsError(f"{target} is the source; choose another destination")
    if is_converted(source):
        raise CheckpointError(f"{source} is converted already")
    layout, contents = layout_in(source, **options)
    with _unfinished(target) as folder:
        with tqdm(unit="B", unit_scale=True, desc=f"converting {source.name}", disable=not progress) as bar:
            weights = HuggingFaceWeights(source, layout, wanted, on_read=bar.update)
            bar.reset(total=weights.nbytes)
            save_parameters(folder / WEIGHTS_FOLDER, weights)
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        marker = {"format_version": FORMAT_VERSION, "dtype": str(weights.dtype), **contents}
        (folder / FORMAT_FILE).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        _put_in_place(folder, target)
    return target


def _in_use(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Provide an empty folder beside `target` for one writer at a time; it is deleted unless it was renamed.

    The lock is on the folder itself and ends with its process, so that what a killed conversion left is reused.
    """
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = target.absolute().with_name(f".{target.name}.unfinished")
    folder.mkdir(exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(held), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise FileExistsError(f"another conversion to {target} is running")
        try:
            _empty(folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; an old `target` is kept until the new one is in place."""
    if not _in_use(target):
        folder.rename(target)
        return
    replaced = folder.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    target.rename(replaced)
    try:
        folder.rename(target)
    except BaseException:
        replaced.rename(target)
        raise
    shutil.rmtree(replaced)
