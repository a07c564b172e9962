"""Checkpoint directories: how to find them, tell their kind, and read their configuration files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.unknown_fields import ConfigOptions

FORMAT_FILE = "jaxinfer.json"  # written last: a converted directory without it is not finished
FORMAT_VERSION = 2
WEIGHTS_FOLDER = "weights"
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
# Files that are downloaded and converted with the weights if the source has them.
COMPANIONS = (
    CONFIG_FILE, GENERATION_CONFIG_FILE, "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt",
)  # fmt: skip


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")

# The checkpoints that are shipped with the engine: a model to try it with, a model and an EAGLE-3 head that draft for
# it, and a diffusion model with experts.
EMBEDDED_CHECKPOINT = "tiny"
EMBEDDED_DRAFT = "tiny-draft"
EMBEDDED_EAGLE3 = "tiny-eagle3"
EMBEDDED_DIFFUSION = "tiny-diffusion"
_EMBEDDED = (EMBEDDED_CHECKPOINT, EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_DIFFUSION)


def embedded_checkpoint(name: str = EMBEDDED_CHECKPOINT) -> Path:
    """Path of an embedded checkpoint: beside the package in a checkout, inside it in an installation.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    package = Path(__file__).parent.parent
    places = [folder / "checkpoints" / name for folder in (package.parent, package)]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"the embedded checkpoint is at none of {', '.join(map(str, places))}; name a model")


def find_checkpoint(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the directory that `source` names; a hub id is downloaded first.

    Args:
        source: a directory, the name of an embedded checkpoint, or a hub id such as "organisation/model".
        revision: branch, tag or commit of a hub id.

    Raises:
        FileNotFoundError: there is no such directory, and `source` is not a hub id or is a path in a local folder.
        CheckpointError: `source` is a file, or the download failed.
    """
    local = _local_directory(source)
    if local is not None:
        return local
    path = Path(source).expanduser()
    if path.exists():
        raise CheckpointError(f"{path} is a file; name the directory that holds {CONFIG_FILE} and the weights")
    return _download(_hub_id(source), revision, (*_WEIGHTS, *COMPANIONS))


def find_config(source: str | os.PathLike[str]) -> Path:
    """Return the configuration file of `source`, which is a file, a directory, an embedded checkpoint or a hub id.

    Nothing else of a hub id is downloaded.

    Raises:
        FileNotFoundError: as for `find_checkpoint`.
        CheckpointError: the directory has no `config.json`, or the download failed.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    return _config_file(_local_directory(source) or _download(_hub_id(source), None, (CONFIG_FILE,)))


def _local_directory(source: str | os.PathLike[str]) -> Path | None:
    """Return the directory at `source`, or the embedded checkpoint of this name; None if there is neither."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    name = os.fspath(source)
    return embedded_checkpoint(name) if name in _EMBEDDED else None


def _config_file(directory: str | os.PathLike[str]) -> Path:
    file = Path(directory) / CONFIG_FILE
    if not file.is_file():
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {CONFIG_FILE}")
    return file


def _hub_id(source: str | os.PathLike[str]) -> str:
    """Return `source` as a hub id; raise FileNotFoundError if it cannot be one."""
    name, path = os.fspath(source), Path(source).expanduser()
    # "a/b" may be a path or a hub id; if the folder a exists, a path was meant.
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or path.parent.is_dir():
        raise FileNotFoundError(f"no checkpoint directory at {path.absolute()}")
    return name


def is_converted(directory: Path) -> bool:
    """Whether `directory` holds a finished conversion; False for a Hugging Face directory.

    Raises:
        CheckpointError: the conversion was interrupted, or another version of this engine wrote it.
    """
    marker = directory / FORMAT_FILE
    if not marker.is_file():
        if (directory / WEIGHTS_FOLDER).is_dir():
            raise CheckpointError(
                f"{directory} is incomplete: {WEIGHTS_FOLDER}/ is there but {FORMAT_FILE} is not, so its conversion "
                "did not finish; delete the directory and run the conversion again"
            )
        return False
    version = read_json(marker).get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{marker} has format_version {version!r}, but this engine reads {FORMAT_VERSION}; convert the source again"
        )
    return True


def read_config(path: str | os.PathLike[str], **options: Unpack[ConfigOptions]) -> tuple[dict[str, Any], ModelConfig]:
    """Read `config.json` of a checkpoint directory; return its fields and the model configuration.

    Args:
        options: `ignore_config_fields` and `strict_config`, about unknown fields, see `ConfigOptions`.

    Raises:
        CheckpointError: there is no `config.json`, or it is not a JSON object.
        UnsupportedConfigError: it describes a model that is not supported.
    """
    values = read_hf_config(path)
    return values, ModelConfig.from_hf(values, **options)


def read_hf_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the fields of `config.json` in the checkpoint directory of a model or a head.

    Raises:
        CheckpointError: as for `read_config`.
    """
    return read_json(_config_file(path))


def read_config_file(file: Path, **options: Unpack[ConfigOptions]) -> ModelConfig:
    """Read a model configuration from a file of any name.

    Args:
        options: as for `read_config`.

    Raises:
        CheckpointError, UnsupportedConfigError: as for `read_config`.
    """
    return ModelConfig.from_hf(read_json(file), **options)


def read_generation_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read `generation_config.json` of a checkpoint directory; the result is empty if there is none.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    file = Path(path) / GENERATION_CONFIG_FILE
    return read_json(file) if file.is_file() else {}


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file is not JSON, or holds another value.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return values


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    import huggingface_hub  # imported here: a local directory does not need it

    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except Exception as error:  # the client raises its own, the transport's and the operating system's errors
        raise CheckpointError(
            f"there is no directory {name}, and as a hub id it cannot be downloaded "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}); "
            "check the name and the network, or pass a local directory"
        ) from error
    return Path(found)
