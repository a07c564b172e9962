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

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging


def be_quiet() -> None:
    """No progress bars, no warnings about what is intended here; one thread, so that results repeat."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def randomize(model: Any, seed: int) -> None:
    """Fill a model wide enough that one token wins clearly: the defaults' small values make all logits alike."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.3 * noise
        elif name.endswith("bias"):
            values = 0.3 * noise
        elif "embed" in name:
            # A tied table is also the output head, where unit rows would give logits of 30 and more.
            values = 0.3 * noise if model.config.tie_word_embeddings else noise
        else:
            # Sharp attention would amplify rounding, which differs between any two implementations.
            gain = 1.0 if any(part in name for part in ("q_proj", "k_proj", "query_key_value")) else 1.5
            values = gain * noise / parameter.shape[-1] ** 0.5
        with torch.no_grad():
            parameter.copy_(values)


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
        model_type: "llama", "qwen2", "qwen3" or "qwen3_moe".
        fields: of the configuration.
        seed: of the weights.
        max_shard_size: such as "60KB"; None for a single file.
        old_format: write `config.json` in the words of transformers before version 5.
        bare: write the decoder without its head (its tensors then lack the prefix `model.`).
    """
    shutil.rmtree(directory, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32)
    randomize(model, seed)
    written = model.model if bare else model
    written.save_pretrained(directory, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    for file in directory.iterdir():
        file.chmod(0o644)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if old_format:
        config = _old_format(config)
    if bare:
        config["architectures"] = [type(model).__name__]
    path.write_text(json.dumps(config, indent=2) + "\n")


def _old_format(config: dict[str, Any]) -> dict[str, Any]:
    values = dict(config)
    rope = dict(values.pop("rope_parameters"))
    values["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    values["rope_scaling"] = None if rope["type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype")
    values.pop("layer_types", None)
    if "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    return values


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
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
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
