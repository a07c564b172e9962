"""Export of models and heads to Hugging Face directories: the inverse of loading one."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxinfer.checkpoint.directory import CONFIG_FILE
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.checkpoint.layout import head_layout
from jaxinfer.checkpoint.safetensors_reader import DTYPES, INDEX_FILE, SINGLE_FILE
from jaxinfer.checkpoint.weight_map import Placement, placements
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3 import Eagle3Head
from jaxinfer.models.eagle3_config import HEAD_ARCHITECTURES, LAYER_IDS, Eagle3Config
from jaxinfer.models.families import FAMILIES
from jaxinfer.models.family import Family, write_switches
from jaxinfer.models.rope import RopeConfig
from jaxinfer.models.rope_fields import write_rope
from jaxinfer.models.wrappers import TEXT_CONFIG, needed_wrapper

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export_hf(
    model: nnx.Module,
    config: ModelConfig,
    directory: str | os.PathLike[str],
    *,
    dtype: Any = "float32",
    max_shard_bytes: int | None = None,
) -> None:
    """Write `config.json` and safetensors with Hugging Face's names and layouts.

    A text model is written without the wrapper that it was published in, unless transformers knows it only there.

    Args:
        model: module with `config`'s parameters.
        config: describes the model; a Hugging Face configuration must be able to express it.
        directory: created if it is missing; must hold no weights yet.
        dtype: dtype of the stored weights.
        max_shard_bytes: start a new file when one would grow past this; None for a single file.

    Raises:
        FileExistsError: `directory` holds weights.
        ValueError: unknown `dtype`, or a configuration that the family's Hugging Face class cannot express.
    """
    placed, wrapper = placements(config), needed_wrapper(config.architecture)
    if wrapper is not None:
        placed = tuple(replace(placement, source=wrapper[1].name_inside(placement.source)) for placement in placed)
    _export(model, placed, hf_config(config), Path(directory), parse_dtype(dtype), max_shard_bytes)


def export_head(head: Eagle3Head, directory: str | os.PathLike[str], *, dtype: Any = "float32") -> None:
    """Write an EAGLE-3 head in its publishers' format: `config.json` and safetensors.

    Args:
        head: head with parameters.
        directory: as for `export_hf`.
        dtype: dtype of the stored weights.

    Raises:
        FileExistsError, ValueError: as for `export_hf`.
    """
    placed = placements(head_layout(head.config))
    _export(head, placed, head_hf_config(head.config), Path(directory), parse_dtype(dtype), None)


def _export(
    module: nnx.Module,
    placed: Sequence[Placement],
    values: dict[str, Any],
    folder: Path,
    stored: np.dtype | None,
    max_shard_bytes: int | None,
) -> None:
    if stored is None:
        raise ValueError("dtype must be given: float32, bfloat16 or float16")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SINGLE_FILE, INDEX_FILE):
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} exists; choose an empty directory")
    text = json.dumps(values | {"dtype": str(stored)}, indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    arrays = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(module))}
    shards = _shards(placed, stored, max_shard_bytes)
    if len(shards) == 1:
        _write(folder / SINGLE_FILE, shards[0], arrays, stored)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / name, shard, arrays, stored)
        weight_map |= {placement.source: name for placement in shard}
    total = sum(_nbytes(placement, stored) for shard in shards for placement in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the Hugging Face `config.json` from which `ModelConfig.from_hf` reads `config` back.

    Raises:
        ValueError: the architecture's Hugging Face class cannot express it; the message names the field.
    """
    family = FAMILIES[config.architecture]
    eos = config.eos_token_ids
    values: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        **_rope_fields(config.rope, family),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
    }
    values |= dict.fromkeys(family.qkv_bias_fields, config.qkv_bias) | dict.fromkeys(
        family.o_bias_fields, config.o_bias
    )
    if family.mlp_bias_field:
        values[family.mlp_bias_field] = config.mlp_bias
    if family.qk_norm_field:
        values[family.qk_norm_field] = config.qk_norm
    if family.rope.has_partial:  # its default may be other than 1
        values["partial_rotary_factor"] = config.rope.partial_rotary_factor
    if "original_max_position_embeddings" in family.defaults:  # it has priority over that of the rotary parameters
        values["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    if config.per_layer_size:
        values["vocab_size_per_layer_input"] = config.vocab_size
    if family.layer_fields is not None:
        values |= family.layer_fields.write(config.all_layers)
    if family.grows_queries:
        beta, original = config.query_growth or (0.0, config.rope.original_max_position_embeddings)
        values["rope_parameters"] |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    values |= write_switches(config, family)
    if family.has_norm_head:
        values["norm_head"] = config.normalizes_head
    if family.has_nextn_layers:
        values["num_nextn_predict_layers"] = 0  # they are not loaded, and so not written
    if family.experts and config.experts:
        values |= family.experts.write(config.experts, config.num_layers)
    if family.is_diffusion:
        values["mask_token_id"] = config.mask_token_id
    if family.has_blocks:
        values["block_size"] = config.block_size
    if family.has_padded_vocab:
        values["embedding_size"] = config.vocab_size
    values = {family.name_of(name): value for name, value in values.items() if name not in family.absent}
    values = _in_wrapper(dict(family.fixed) | values)
    back = ModelConfig.from_hf(values)
    for name in ModelConfig.__dataclass_fields__:
        if name not in ("dtype", "num_nextn_layers") and getattr(back, name) != getattr(config, name):
            raise ValueError(
                f"{family.architecture} in Hugging Face's format cannot express {name}={getattr(config, name)!r}"
            )
    return values


def _in_wrapper(values: dict[str, Any]) -> dict[str, Any]:
    """Return a text model's fields, within those of its wrapper if transformers knows the model only there."""
    [architecture] = values["architectures"]
    found = needed_wrapper(architecture)
    if found is None:
        return values
    text = {name: value for name, value in values.items() if name != "architectures"}
    tied = values["tie_word_embeddings"]
    return {
        "architectures": [found[0]], "model_type": found[1].model_type, "tie_word_embeddings": tied, TEXT_CONFIG: text,
    }  # fmt: skip


def head_hf_config(config: Eagle3Config) -> dict[str, Any]:
    """Return the `config.json` of a head from which `Eagle3Config.from_hf` with its target reads `config` back.

    Raises:
        ValueError: as for `hf_config`.
    """
    names = {family: name for name, family in HEAD_ARCHITECTURES.items()}
    values = hf_config(config.layer) | {
        "architectures": [names[config.layer.architecture]],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        LAYER_IDS: list(config.capture),
    }
    if config.capture[0]:  # as the output of the layer before, which the first layer lacks
        values["eagle_config"] = {LAYER_IDS: [number - 1 for number in config.capture], "use_aux_hidden_state": True}
    return values


def _rope_fields(rope: RopeConfig, family: Family) -> dict[str, Any]:
    parameters = write_rope(rope)
    if "rope_parameters" not in family.absent:
        return {"rope_parameters": parameters}
    # The format of transformers before version 5, which the published code of these families reads.
    theta = parameters.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if rope.rope_type == "default" else parameters}


def _nbytes(placement: Placement, dtype: np.dtype) -> int:
    return int(np.prod(placement.taken_shape)) * placement.dtype_in_file(dtype).itemsize


def _shards(placed: Sequence[Placement], dtype: np.dtype, limit: int | None) -> list[list[Placement]]:
    shards: list[list[Placement]] = [[]]
    size = 0
    for placement in placed:
        nbytes = _nbytes(placement, dtype)
        goes_on = shards[-1] and shards[-1][-1].source == placement.source
        if limit is not None and shards[-1] and size + nbytes > limit and not goes_on:
            shards.append([])
            size = 0
        shards[-1].append(placement)
        size += nbytes
    return shards


def _write(file: Path, shard: Sequence[Placement], arrays: Mapping[str, Any], dtype: np.dtype) -> None:
    """Write one safetensors file: the header's length, the header, the tensors in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for placement in shard:
        end = offset + _nbytes(placement, dtype)
        # A source tensor may be made of several parameters, or of parts of one: these parts are contiguous.
        begin = header[placement.source]["data_offsets"][0] if placement.source in header else offset
        header[placement.source] = {
            "dtype": _DTYPE_NAMES[placement.dtype_in_file(dtype)],
            "shape": list(placement.source_shape),
            "data_offsets": [begin, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for placement, tensor in zip(shard, _tensors(shard, arrays), strict=True):
            stream.write(tensor.astype(placement.dtype_in_file(dtype)).tobytes())


def _tensors(shard: Sequence[Placement], arrays: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Yield the tensors of a shard; a parameter that several of them share is fetched once."""
    path, whole = "", np.empty(0)
    for placement in shard:
        if placement.target.path != path:
            path, whole = placement.target.path, np.asarray(arrays[placement.target.path])
        yield placement.to_source(whole)
