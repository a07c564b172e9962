"""Convert freshly made sharded Hugging Face checkpoints and compare greedy tokens with transformers.

For every family: transformers writes a random checkpoint in shards, `jaxinfer convert` converts it, `LLM` completes
several prompts in one batch, transformers completes them one by one, and a table says where they agree. Needs the
parity environment (`make venv-parity`) besides this one. Ends with status 1 if a token differs that is not a near tie.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hf_parity.comparison import DEFAULT_PYTHON, ask_transformers, compare
from jaxinfer import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent

_SIZES = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
          "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    },
    "qwen2": _SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen3": _SIZES | {
        "head_dim": 64,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                            "original_max_position_embeddings": 128},
    },
}  # fmt: skip


def run_engine(directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens of all prompts from one batch, in chunks of at most 64 tokens a step."""
    longest = max(map(len, prompts)) + new_tokens
    llm = LLM(
        directory, skip_tokenizer_init=True, dtype="float32", max_num_seqs=len(prompts), max_num_batched_tokens=64,
        max_model_len=longest, kv_cache_tokens=len(prompts) * (longest + 16),
    )  # fmt: skip
    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="repeatable; default: all")
    parser.add_argument("--seed", type=int, default=None, help="of weights and prompts; default: a fresh one")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 5, 16, 33, 64, 100], help="of the prompts")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--max-shard-size", default="2MB")
    parser.add_argument("--near-tie", type=float, default=1e-3, help="margin below which a difference is a tie")
    parser.add_argument("--parity-python", type=Path, default=DEFAULT_PYTHON, help="interpreter that has torch")
    arguments = parser.parse_args()
    if not arguments.parity_python.exists():
        parser.error(f"{arguments.parity_python} does not exist; run `make venv-parity`, or name it")
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    console = Console()
    different = 0
    for family in arguments.family or FAMILIES:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, _SIZES["vocab_size"], length).tolist() for length in arguments.lengths]
        make = {"model_type": family, "fields": FAMILIES[family], "seed": seed,
                "max_shard_size": arguments.max_shard_size}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            source, converted = Path(folder, f"{family}-hf"), Path(folder, f"{family}-converted")
            console.print(f"[bold]{family}[/bold], seed {seed}: transformers makes a checkpoint and completes prompts")
            theirs = ask_transformers(arguments.parity_python, source, prompts, arguments.new_tokens, make)
            shards = sorted(source.glob("*.safetensors"))
            size = sum(file.stat().st_size for file in shards) / 1e6
            console.print(f"it wrote {len(shards)} shards, {size:.1f} MB")
            subprocess.run([sys.executable, "-m", "jaxinfer", "convert", source, converted], cwd=ROOT, check=True)
            ours = run_engine(converted, prompts, arguments.new_tokens)
        table = Table("prompt tokens", "equal tokens", "smallest margin, or where they part", "verdict", title=family)
        for row in compare(prompts, ours, theirs):
            verdict = row.verdict(arguments.near_tie)
            different += verdict == "DIFFERENT"
            table.add_row(str(row.prompt_length), f"{row.equal}/{row.length}", f"{row.margin:.5f}", verdict)
        console.print(table)
    console.print("every token agrees, or is a near tie" if not different else f"{different} prompts differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
