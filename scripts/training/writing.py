"""Writing trained parameters as a checkpoint directory of the engine."""

from __future__ import annotations

import json
from pathlib import Path

from flax import nnx
from transformers import PreTrainedTokenizerFast

from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.checkpoint.export import export_hf
from jaxinfer.models.config import ModelConfig
from training.initialization import CONTEXT
from training.tokenizer import END_OF_TURN, PAD, save_tokenizer, token_ids


def write_checkpoint(
    module: nnx.Module, model: ModelConfig, tokenizer: PreTrainedTokenizerFast, source: Path, output: Path
) -> None:
    """Write a Hugging Face directory, `source`, which must hold no weights, and convert it to `output`, in bfloat16."""
    save_tokenizer(tokenizer, source)
    export_hf(module, model, source, dtype="bfloat16")
    ids = token_ids(tokenizer, (END_OF_TURN, PAD))
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "eos_token_id": ids[END_OF_TURN],
        "pad_token_id": ids[PAD],
        "max_length": CONTEXT,
    }
    (source / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    convert_checkpoint(source, output, overwrite=output.exists(), progress=False)
