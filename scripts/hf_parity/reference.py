"""Random checkpoints, and what Hugging Face's torch implementations compute from a checkpoint.

Runs in the parity environment (`make venv-parity`), whose Python has torch. Other programs call it with the path of a
JSON file:

    {"directory": where the checkpoint is,
     "make": null, or how to make it: {"model_type", "fields", "seed", "max_shard_size", "old_format", "bare"},
     "prompts": [[token ids], ...], "new_tokens": how many to add to each, "output": path of an .npz}

The output holds `logits_<i>` [T, V] of prompt i, `greedy` [prompts, new_tokens] and `margins`, of the same shape: how
far each greedy token's logit was above the second best.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

# Norms that compute with 1 + weight.
_CENTRED_NORMS = ("Gemma2RMSNorm", "Gemma3RMSNorm", "MuseGlimmerTextCenteredRMSNorm")
_SCORE_PROJECTIONS = ("q_proj", "k_proj", "qkv_proj", "query_key_value")
# Model types whose layer types follow from other fields of older files.
_WITHOUT_LAYER_TYPES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")


def be_quiet() -> None:
    """No progress bars, no warnings about what is intended here; one thread, so that results repeat."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def randomize(model: Any, seed: int) -> None:
    """Fill a model wide enough that one token wins clearly: the defaults' small values make all logits alike."""
    generator = torch.Generator().manual_seed(seed)
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            module = model.get_submodule(name.rpartition(".")[0])
            parameter.copy_(_values(module, name, noise, is_tied))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def _values(module: Any, name: str, noise: torch.Tensor, is_tied: bool) -> torch.Tensor:
    """Values of one parameter of a module, from noise of its shape."""
    kind = type(module).__name__
    if "norm" in name:
        values = 0.3 * noise if kind in _CENTRED_NORMS else 1 + 0.3 * noise
        # Scores of Gemma 4 are not divided by anything.
        is_steep = kind.startswith("Gemma4") and name.endswith(("q_norm.weight", "k_norm.weight"))
        return 0.6 * values if is_steep else values
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise  # more would leave experts without tokens
    if name.endswith("bias"):
        return 0.3 * noise
    if name.endswith(("router.scale", "router.per_expert_scale")):
        return 1 + 0.3 * noise
    if name.endswith("sinks"):
        return noise
    if "embed" in name:
        if hasattr(module, "embed_scale") and name.endswith("embed_tokens.weight"):
            return 0.15 * noise  # multiplied by the root of the hidden size
        # A tied table is also the output head, where unit rows would give logits of 30 and more.
        return 0.3 * noise if is_tied else noise
    if name.endswith("router.proj.weight"):
        return 1.5 * noise  # its rows have a length of one
    # Sharp attention would amplify rounding, which differs between any two implementations.
    gain = 1.0 if any(part in name for part in _SCORE_PROJECTIONS) else 1.5
    return gain * noise / noise.shape[-2 if kind == "GptOssExperts" else -1] ** 0.5


def make_checkpoint(
    directory: Path,
    model_type: str,
    fields: dict[str, Any],
    seed: int,
    max_shard_size: str | None = None,
    old_format: bool = False,
    bare: bool = False,
) -> None:
    """Write a random checkpoint with transformers' own `save_pretrained`.

    Args:
        directory: made anew.
        model_type: as transformers names it, such as "qwen3_moe".
        fields: of the configuration.
        seed: of the weights.
        max_shard_size: such as "60KB"; None for a single file.
        old_format: write `config.json` in the words of transformers before version 5.
        bare: write the decoder without its head (its tensors then lack the prefix `model.`).
    """
    shutil.rmtree(directory, ignore_errors=True)
    # Configurations change the dictionaries that they are given.
    config = AutoConfig.for_model(model_type, **copy.deepcopy(fields))
    model = _auto_class(model_type).from_config(config, dtype=torch.float32)
    randomize(model, seed)
    written = model.model if bare else model
    written.save_pretrained(directory, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    for file in directory.iterdir():
        file.chmod(0o644)
    path = directory / "config.json"
    written_config = json.loads(path.read_text())
    if old_format:
        written_config = _old_format(written_config)
    if bare:
        written_config["architectures"] = [type(model).__name__]
    path.write_text(json.dumps(written_config, indent=2) + "\n")


def _auto_class(model_type: str) -> Any:
    return AutoModelForImageTextToText if model_type == "muse_glimmer" else AutoModelForCausalLM


def _old_format(config: dict[str, Any]) -> dict[str, Any]:
    values = dict(config)
    model_type = values["model_type"]
    if "text_config" in values:
        values["text_config"] = _old_format(values["text_config"])
    if "rope_parameters" in values and model_type != "gemma4_text":
        _make_rope_old(values)
    if "dtype" in values:
        values["torch_dtype"] = values.pop("dtype")
    if model_type in _WITHOUT_LAYER_TYPES:
        values.pop("layer_types", None)
        values.pop("_sliding_window_pattern", None)
    if model_type == "qwen3_moe" and "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    if "per_layer_config" in values:  # full layers of Gemma 4 are alike
        full = next(iter(values.pop("per_layer_config").values()))
        values["global_head_dim"] = full["head_dim"]
        values["num_global_key_value_heads"] = full.get("num_key_value_heads")
    return values


def _make_rope_old(values: dict[str, Any]) -> None:
    rope = dict(values.pop("rope_parameters"))
    if "full_attention" in rope:  # only full layers have a scaling
        sliding, rope = rope["sliding_attention"], dict(rope["full_attention"])
        values["rope_theta"] = rope.pop("rope_theta")
        if sliding["rope_theta"] != values["rope_theta"]:
            values["rope_local_base_freq"] = sliding["rope_theta"]
        values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        return
    values["rope_theta"] = rope.pop("rope_theta")
    partial = rope.pop("partial_rotary_factor", None)
    if partial is not None and "rotary_dim" not in values:
        values["partial_rotary_factor"] = partial
    if "original_max_position_embeddings" in values:
        rope.pop("original_max_position_embeddings", None)
    rope["type"] = rope.pop("rope_type")
    values["rope_scaling"] = None if rope["type"] == "default" else rope


def run_prompt(directory: Path, prompt: list[int], new_tokens: int) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Logits [T, V] of a prompt, its greedy continuation, and the margin of every token of it.

    The model is opened anew every time: the dynamic rotary type remembers the longest sequence it has seen.
    """
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = open_checkpoint(directory)(ids).logits[0].numpy()
    out = open_checkpoint(directory).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(out.logits)[:, 0].topk(2).values
    tokens = out.sequences[0, len(prompt) :].tolist()
    assert len(tokens) == new_tokens
    return logits, tokens, (best[:, 0] - best[:, 1]).numpy()


def open_checkpoint(directory: Path) -> Any:
    """The model of a directory, in float32."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    model = _auto_class(model_type).from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every continuation has its full length
    return model


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    be_quiet()
    directory = Path(job["directory"])
    if job["make"] is not None:
        make_checkpoint(directory, **job["make"])
    logits, greedy, margins = zip(
        *(run_prompt(directory, prompt, job["new_tokens"]) for prompt in job["prompts"]), strict=True
    )
    by_prompt = {f"logits_{number}": values for number, values in enumerate(logits)}
    np.savez(job["output"], greedy=np.asarray(greedy, np.int32), margins=np.stack(margins), **by_prompt)


if __name__ == "__main__":
    main(*sys.argv[1:])
