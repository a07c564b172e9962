"""What published checkpoints have and transformers does not write: MXFP4 experts, and tensors that nothing reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

BLOCK = 32  # columns that share a scale
# A byte of a scale is the exponent of a power of two plus this.
_BIAS = 127
# What the lower three bits of a half byte say; the fourth is the sign.
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def to_mxfp4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round weights [..., rows, columns] to MXFP4.

    Returns:
        blocks: uint8 [..., rows, columns / 32, 16]; the low half of a byte is the earlier column.
        scales: uint8 [..., rows, columns / 32].
    """
    groups = weights.reshape(*weights.shape[:-1], -1, BLOCK)
    largest = np.maximum(np.abs(groups).max(-1), np.float32(2.0**-100))
    exponents = np.floor(np.log2(largest)).astype(np.int32) - 2  # the largest magnitude is 1.5 * 2**2
    scaled = np.ldexp(np.abs(groups), -exponents[..., None])
    halves = np.abs(scaled[..., None] - _MAGNITUDES).argmin(-1) + 8 * np.signbit(groups)
    blocks = halves[..., 0::2] + 16 * halves[..., 1::2]
    return blocks.astype(np.uint8), (exponents + _BIAS).astype(np.uint8)


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Weights [..., rows, columns] in float32 that blocks and scales stand for."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    magnitudes = _MAGNITUDES[halves & 7]
    values = np.where(halves & 8, -magnitudes, magnitudes)
    exponents = scales.astype(np.int32)[..., None] - _BIAS
    return np.ldexp(values, exponents).reshape(*blocks.shape[:-2], -1)


def round_experts(directory: Path) -> dict[str, np.ndarray]:
    """Replace the experts of GPT-OSS [E, inputs, outputs] by what MXFP4 keeps of them.

    Returns:
        Blocks and scales by name, with outputs as rows, as published.
    """
    tensors = load_file(directory / "model.safetensors")
    packed = {}
    for name in [name for name in tensors if name.endswith(_EXPERTS)]:
        blocks, scales = to_mxfp4(tensors[name].swapaxes(1, 2))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = from_mxfp4(blocks, scales).swapaxes(1, 2)
    _write(directory, tensors)
    return packed


def store_packed(directory: Path, packed: Mapping[str, np.ndarray]) -> None:
    """Put the blocks and scales of `round_experts` in the place of its rounded experts."""
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in packed}
    _write(directory, kept | dict(packed))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    }  # fmt: skip
    path.write_text(json.dumps(config, indent=2) + "\n")


def add_unused(directory: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Add random tensors that no model reads."""
    random = np.random.default_rng(seed)
    unused = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    _write(directory, load_file(directory / "model.safetensors") | unused)


def _write(directory: Path, tensors: Mapping[str, np.ndarray]) -> None:
    path = directory / "model.safetensors"
    ordered = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    save_file(ordered, path, metadata={"format": "pt"})
    path.chmod(0o644)
