"""Record what Hugging Face's torch implementations compute on tiny random checkpoints: `tests/fixtures/hf`.

Runs in the parity environment (`make venv-parity`), whose Python has torch; the tests that read the result need
neither. Every checkpoint is written by transformers itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_parity.fixtures import (
    NEW_TOKENS,
    SMALLEST_MARGIN,
    SMALLEST_ROUTER_GAP,
    describe,
    first_seed,
    prompts,
    write_expected,
)
from hf_parity.reference import be_quiet, make_checkpoint, open_checkpoint, run_prompt
from hf_parity.routers import Chosen, Routing, chosen_experts, watch_routers

PROMPT_LENGTHS = (1, 2, 7, 16, 17, 33, 63, 100)

_COMMON = {"vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
# name -> (model type, configuration, save_pretrained's max_shard_size, old format of config.json)
CASES: dict[str, tuple[str, dict, str | None, bool]] = {
    "llama3_tied": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 512, "bos_token_id": 3, "eos_token_id": [126, 127],
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
        None, False,
    ),
    "llama_biases_yarn": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "attention_bias": True, "mlp_bias": True,
         "max_position_embeddings": 256, "hidden_act": "gelu_pytorch_tanh",
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                             "original_max_position_embeddings": 64}},
        None, False,
    ),
    "qwen2_linear_sharded": (
        "qwen2",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "rope_parameters": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0}},
        "60KB", True,
    ),
    "qwen2_tied": (
        "qwen2",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 256,
         "tie_word_embeddings": True},
        None, False,
    ),
    "qwen3_yarn_tied": (
        "qwen3",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
         "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "truncate": False,
                             "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 64}},
        None, False,
    ),
    "qwen3_dynamic": (
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 64,
         "attention_bias": True, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
        None, False,
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
         "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        None, False,
    ),
    # Of four layers, `decoder_sparse_step` leaves experts to the second and fourth, `mlp_only_layers` to the fourth.
    "qwen3_moe_mixed": (
        "qwen3_moe",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
         "num_hidden_layers": 4, "intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 16, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [1],
         "tie_word_embeddings": True},
        None, True,
    ),
}  # fmt: skip

# name -> (head_dim, max_position_embeddings, rope_parameters)
ROPES: dict[str, tuple[int, int, dict]] = {
    "default": (64, 4096, {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (128, 8192, {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0}),
    "llama3_8b": (128, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "llama3_1b": (64, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "yarn": (128, 131072, {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                           "original_max_position_embeddings": 32768}),
    "yarn_attention_factor": (64, 16384, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                          "attention_factor": 0.9, "original_max_position_embeddings": 4096}),
    "yarn_mscale": (64, 163840, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.8,
                                 "mscale_all_dim": 1.2, "beta_fast": 24.0, "beta_slow": 2.0,
                                 "original_max_position_embeddings": 4096}),
    "yarn_untruncated": (64, 131072, {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
                                      "original_max_position_embeddings": 4096}),
    "dynamic": (64, 2048, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
}  # fmt: skip
ROPE_LENGTHS = (1, 100, 2048, 2049, 4096, 7777)


def make_case(name: str, directory: Path, seed: int) -> bool:
    """Write one checkpoint and what it computes; returns whether everything chosen there was chosen clearly."""
    model_type, fields, max_shard_size, old_format = CASES[name]
    make_checkpoint(directory, model_type, _COMMON | fields, seed, max_shard_size, old_format)
    asked = prompts(PROMPT_LENGTHS, _COMMON["vocab_size"], seed)
    logits, greedy, margins = zip(*(run_prompt(directory, prompt, NEW_TOKENS) for prompt in asked), strict=True)
    smallest = min(float(of_prompt.min()) for of_prompt in margins)
    more = {"greedy": np.asarray(greedy, np.int32), "smallest_margin": np.float32(smallest)}
    is_clear = smallest > SMALLEST_MARGIN
    if "num_experts" in fields:
        chosen = _routed(directory, [prompt + tokens for prompt, tokens in zip(asked, greedy, strict=True)], fields)
        more["smallest_router_gap"] = np.float32(chosen.smallest_gap)
        is_clear = is_clear and chosen.uses_every_expert and chosen.smallest_gap > SMALLEST_ROUTER_GAP
    write_expected(directory, asked, list(logits), **more)
    return is_clear


def _routed(directory: Path, sequences: list[list[int]], fields: dict) -> Chosen:
    model = open_checkpoint(directory)
    with watch_routers(model) as seen, torch.no_grad():
        for tokens in sequences:
            model(torch.tensor([tokens]))
    return chosen_experts(seen, Routing(fields["num_experts_per_tok"]))


def rope_values() -> dict:
    """Frequencies and scaling factors of every rotary type, and cos of the dynamic one at several lengths."""
    found = {}
    for name, (head_dim, length, parameters) in ROPES.items():
        config: PretrainedConfig = LlamaConfig(
            hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=length,
            rope_parameters=dict(parameters),
        )  # fmt: skip
        embedding = LlamaRotaryEmbedding(config)
        entry = {
            "head_dim": head_dim,
            "max_position_embeddings": length,
            "rope_parameters": parameters,
            "attention_factor": float(embedding.attention_scaling),
            "inverse_frequencies": embedding.inv_freq.tolist(),
        }
        if name == "dynamic":
            entry["by_length"] = {}
            for seen in ROPE_LENGTHS:
                fresh = LlamaRotaryEmbedding(config)
                fresh(torch.zeros(1), torch.tensor([[seen - 1]]))
                entry["by_length"][str(seen)] = fresh.inv_freq.tolist()
        found[name] = entry
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("tests/fixtures/hf"))
    parser.add_argument("--only", action="append", choices=CASES, help="write only this case; may be repeated")
    arguments = parser.parse_args()
    be_quiet()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or CASES:
        seed = first_seed(lambda seed, name=name: make_case(name, arguments.output / name, seed))
        print(f"{name}: {describe(arguments.output / name, seed)}")
    if not arguments.only:
        (arguments.output / "rope.json").write_text(json.dumps(rope_values()) + "\n")


if __name__ == "__main__":
    main()
