"""Record what Hugging Face's torch implementations compute on tiny random checkpoints: `tests/fixtures/hf`.

Runs in the parity environment (`make venv-parity`), whose Python has torch; the tests that read the result need
neither. Every checkpoint is written by transformers itself; `hf_parity/published.py` adds what it does not write.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file
from transformers import LlamaConfig, PretrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_parity.dense_cases import DENSE_CASES
from hf_parity.expert_cases import EXPERT_CASES
from hf_parity.fixtures import (
    NEW_TOKENS,
    SMALLEST_MARGIN,
    SMALLEST_ROUTER_GAP,
    describe,
    first_seed,
    prompts,
    write_expected,
)
from hf_parity.gemma_cases import GEMMA_CASES
from hf_parity.published import add_unused, round_experts, store_packed
from hf_parity.reference import be_quiet, make_checkpoint, open_checkpoint, run_prompt
from hf_parity.routers import Chosen, Routing, chosen_experts, watch_routers

PROMPT_LENGTHS = (1, 2, 7, 16, 17, 33, 63, 100)
CASES = DENSE_CASES | EXPERT_CASES | GEMMA_CASES

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
    """Write one checkpoint and what it computes; returns whether everything chosen there was chosen clearly.

    Where it was not, there are no results beside the checkpoint.
    """
    case = CASES[name]
    make_checkpoint(directory, case.model_type, case.fields, seed, case.max_shard_size, case.old_format)
    if case.unused:
        add_unused(directory, case.unused, seed)
    packed = round_experts(directory) if case.is_mxfp4 else {}
    asked = prompts(PROMPT_LENGTHS, case.vocab_size, seed)
    logits, greedy, smallest = [], [], float("inf")
    for prompt in asked:
        of_prompt, tokens, margins = run_prompt(directory, prompt, NEW_TOKENS)
        logits.append(of_prompt)
        greedy.append(tokens)
        smallest = min(smallest, float(margins.min()))
        if smallest <= SMALLEST_MARGIN:
            return False
    more = {"greedy": np.asarray(greedy, np.int32), "smallest_margin": np.float32(smallest)}
    if case.routing is not None:
        sequences = [prompt + tokens for prompt, tokens in zip(asked, greedy, strict=True)]
        chosen = _routed(directory, sequences, case.routing)
        more["smallest_router_gap"] = np.float32(chosen.smallest_gap)
        if chosen.smallest_gap <= SMALLEST_ROUTER_GAP or not chosen.uses_every_expert:
            return False
    if packed:
        _check_packed(directory, packed)
        store_packed(directory, packed)
    write_expected(directory, asked, logits, **more)
    return True


def _routed(directory: Path, sequences: list[list[int]], routing: Routing) -> Chosen:
    model = open_checkpoint(directory)
    with watch_routers(model) as seen, torch.no_grad():
        for tokens in sequences:
            model(torch.tensor([tokens]))
    return chosen_experts(seen, routing)


def _check_packed(directory: Path, packed: Mapping[str, np.ndarray]) -> None:
    """Check that transformers reads blocks and scales as the weights that the results were computed with."""
    weights = load_file(directory / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")]:
        blocks, scales = (torch.from_numpy(packed[f"{name}_{part}"]) for part in ("blocks", "scales"))
        read = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        if not torch.equal(read, torch.from_numpy(weights[name])):
            raise RuntimeError(f"transformers reads other weights from the blocks and scales of {name}")


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
    parser.add_argument("--missing", action="store_true", help="write only cases that have no results yet")
    arguments = parser.parse_args()
    be_quiet()
    arguments.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only or CASES:
        directory = arguments.output / name
        if arguments.missing and (directory / "expected.npz").exists():
            continue
        try:
            seed = first_seed(lambda seed, name=name, path=directory: make_case(name, path, seed))
        except Exception:  # the others can still be recorded
            traceback.print_exc()
            failed.append(name)
        else:
            print(f"{name}: {describe(directory, seed)}", flush=True)
    if not arguments.only and not arguments.missing:
        (arguments.output / "rope.json").write_text(json.dumps(rope_values()) + "\n")
    if failed:
        raise SystemExit(f"not recorded: {', '.join(failed)}")


if __name__ == "__main__":
    main()
