"""EAGLE-3 heads from their checkpoints: contents of a directory, check against the target, and loading."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.directory import (
    FORMAT_FILE,
    WEIGHTS_FOLDER,
    find_checkpoint,
    is_converted,
    read_hf_config,
    read_json,
)
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.huggingface import HuggingFaceWeights
from jaxinfer.checkpoint.incoming import NamedTensors
from jaxinfer.checkpoint.layout import Layout, head_layout, layout_of
from jaxinfer.checkpoint.load import around, load_parameters, tensor_size
from jaxinfer.checkpoint.orbax_store import StoredParameters
from jaxinfer.checkpoint.safetensors_reader import StoredTensor, open_checkpoint
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.eagle3 import Eagle3Head
from jaxinfer.models.eagle3_config import Eagle3Config, draft_vocab_size, head_fields, head_layer, is_head
from jaxinfer.models.unknown_fields import ConfigOptions

HEAD_ENTRY, TARGET_IDS = "head", "target_ids"


@dataclass(frozen=True)
class HeadContents:
    """Properties of a head that its weights tell and its `config.json` does not.

    Attributes:
        num_features: features of the target that it takes for one token.
        has_embeddings: whether it has its own embeddings.
        has_token_ids: whether it maps draft tokens to target ids; else draft token i is the target's token i.
    """

    num_features: int
    has_embeddings: bool
    has_token_ids: bool

    def layout(self, hf: Mapping[str, Any]) -> Layout:
        """Layout of the parameters, which is the same for every target.

        Raises:
            UnsupportedConfigError: see `Eagle3Config.from_hf`.
        """
        # The captured layers change no parameter, so any one layer stands for them.
        config = Eagle3Config(head_layer(hf), draft_vocab_size(hf), self.num_features, (0,), self.has_embeddings)
        return head_layout(config, self.has_token_ids)


def head_contents(tensors: Mapping[str, StoredTensor], hf: Mapping[str, Any]) -> HeadContents:
    """Return the contents of a head, from the tensors of its Hugging Face directory.

    Raises:
        UnsupportedConfigError: see `Eagle3Config.from_hf`.
    """
    layer = head_layer(hf)
    layout = head_layout(Eagle3Config(layer, draft_vocab_size(hf), layer.hidden_size, (0,)))
    found = {layout.mapped(name): tensor.shape for name, tensor in tensors.items()}
    fc = found.get("fc.weight", ())
    return HeadContents(
        num_features=fc[1] if len(fc) == 2 else layer.hidden_size,
        has_embeddings="embed_tokens.weight" in found,
        # A full draft vocabulary needs no ids. A smaller one does: without `d2t`, loading reports it as missing.
        has_token_ids="d2t" in found or draft_vocab_size(hf) < layer.vocab_size,
    )


def layout_in(directory: Path, **options: Unpack[ConfigOptions]) -> tuple[Layout, dict[str, Any]]:
    """Return the layout of the weights in a Hugging Face directory of a model or a head.

    The second result holds what only the weights tell, for the converted directory's `jaxinfer.json`.

    Args:
        options: about unknown fields of the configuration, see `ConfigOptions`.

    Raises:
        CheckpointError: the directory holds no configuration or no readable weights.
        UnsupportedConfigError: its configuration is not supported.
    """
    hf = read_hf_config(directory)
    if not is_head(hf):
        return layout_of(ModelConfig.from_hf(hf, **options)), {}
    hf = head_fields(hf, **options)
    contents = head_contents(open_checkpoint(directory), hf)
    return contents.layout(hf), {HEAD_ENTRY: dataclasses.asdict(contents)}


def load_head(
    path: str | os.PathLike[str],
    target: ModelConfig,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    **options: Unpack[ConfigOptions],
) -> Eagle3Head:
    """Load the EAGLE-3 head of a converted directory, a Hugging Face directory or a hub id onto its devices.

    Attention heads, the MLP and the head's own embeddings are sharded like the target's; `fc`, norms and the output
    head are replicated.

    Args:
        path: the directory, or a hub id.
        target: the model that it drafts for.
        dtype: dtype of the weights ("float32", "bfloat16", "float16"); None or "auto" for the checkpoint's. Token ids
            are always int32.
        mesh: as for `load_checkpoint`.
        options: `ignore_config_fields` and `strict_config`, about unknown fields, see `ConfigOptions`.

    Returns:
        The head; its `config` is the one that the devices compute, as for `load_checkpoint`.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        CheckpointError: the checkpoint is incomplete, damaged, does not fit its configuration, or does not fit the
            target; the message names what differs.
        UnsupportedConfigError: it is not a head, is a head of another target, or is not supported.
        ValueError: unknown `dtype`, or the mesh cannot split the head evenly.
    """
    wanted, directory = parse_dtype(dtype), find_checkpoint(path)
    config, has_token_ids = _described(directory, target, options)
    stored = head_layout(config, has_token_ids)
    effective = _spread(config, mesh)
    if is_converted(directory):
        source = StoredParameters(directory / WEIGHTS_FOLDER, parameters(stored), wanted)
    else:
        source = HuggingFaceWeights(directory, stored, wanted)
    arrays = load_parameters(source, parameters(stored), parameters(head_layout(effective, has_token_ids)), mesh)
    if not has_token_ids:
        whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        arrays[TARGET_IDS] = jax.device_put(_own_ids(config), whole)
    _check_ids(np.asarray(arrays[TARGET_IDS]), target.vocab_size, str(directory))
    effective = dataclasses.replace(effective, layer=dataclasses.replace(effective.layer, dtype=str(source.dtype)))
    dtype = jnp.dtype(source.dtype)
    return around(nnx.eval_shape(lambda: Eagle3Head(effective, dtype=dtype, rngs=nnx.Rngs(0))), arrays)


def assembled_head(
    tensors: Iterable[tuple[str, Any]],
    path: str | os.PathLike[str],
    target: ModelConfig,
    *,
    dtype: Any,
    mesh: Mesh | None = None,
    **options: Unpack[ConfigOptions],
) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a head by path, each as soon as it is complete, as `load_head` of `path` returns them.

    Args:
        tensors: (Hugging Face name, array) in any order: what a checkpoint of the head in `path` would have.

    Raises:
        CheckpointError: a draft word is outside of the target's vocabulary.
        ValueError: see `NamedTensors.assembled`. Other errors are those of `load_head`.
    """
    config, has_token_ids = _described(find_checkpoint(path), target, options)
    final = head_layout(_spread(config, mesh), has_token_ids)
    for name, leaf in NamedTensors(head_layout(config, has_token_ids), dtype, final).assembled(tensors):
        if name == TARGET_IDS:
            _check_ids(np.asarray(leaf), target.vocab_size, "the tensors")
        yield name, leaf
    if not has_token_ids:
        yield TARGET_IDS, _own_ids(config)


def _described(directory: Path, target: ModelConfig, options: ConfigOptions) -> tuple[Eagle3Config, bool]:
    """Return a head's configuration, and whether it maps draft tokens to target ids."""
    hf = head_fields(read_hf_config(directory), **options)
    config = Eagle3Config.from_hf(hf, target)
    contents = _read_contents(directory) if is_converted(directory) else head_contents(open_checkpoint(directory), hf)
    _check_fits(contents, config, target, directory)
    return dataclasses.replace(config, has_embeddings=contents.has_embeddings), contents.has_token_ids


def _spread(config: Eagle3Config, mesh: Mesh | None) -> Eagle3Config:
    """Return a head's configuration as its devices compute it."""
    return dataclasses.replace(config, layer=for_tensor_parallel(config.layer, tensor_size(mesh)))


def _own_ids(config: Eagle3Config) -> np.ndarray:
    return np.arange(config.draft_vocab_size, dtype=np.int32)


def _read_contents(directory: Path) -> HeadContents:
    entry = read_json(directory / FORMAT_FILE).get(HEAD_ENTRY)
    if not isinstance(entry, dict) or entry.keys() != HeadContents.__dataclass_fields__.keys():
        raise CheckpointError(f"{directory / FORMAT_FILE} does not describe a head; convert the source again")
    return HeadContents(**entry)


def _check_fits(contents: HeadContents, config: Eagle3Config, target: ModelConfig, directory: Path) -> None:
    if contents.num_features != config.num_features:
        raise CheckpointError(
            f"the head in {directory} is not of this target: its fc takes {contents.num_features} features of a token, "
            f"but {len(config.capture)} layers {config.capture} of hidden size {target.hidden_size} give "
            f"{config.num_features}"
        )
    hidden = config.layer.hidden_size
    if not contents.has_embeddings and hidden != target.hidden_size:
        raise UnsupportedConfigError(
            f"the head in {directory} has no embed_tokens.weight, and the embeddings of its target, of hidden size "
            f"{target.hidden_size}, are not as wide as its own hidden_size={hidden}"
        )


def _check_ids(ids: np.ndarray, vocab_size: int, source: str) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        word = int(outside[0])
        raise CheckpointError(
            f"d2t in {source} says that draft word {word} is token {ids[word]}, outside of the target's vocabulary "
            f"of {vocab_size}"
        )
