"""Record what models compute whose torch code comes with their checkpoints: `tests/fixtures/hf_remote`.

Nothing of that code is part of this repository. It is read from `--code`, a folder that has to hold these files of
repositories on GitHub:

    configuration_bailing_moe.py, modeling_bailing_moe.py          inclusionAI/Ling, models/
    configuration_bailing_moe_v2.py, modeling_bailing_moe_v2.py    inclusionAI/Ling-V2, models/
    configuration_llada2_moe.py, modeling_llada2_moe.py            inclusionAI/dFactory, models/llada2_moe/

It runs with the transformers that it was written for, 4.52.3, and the parity environment's torch. All is used as it is,
except the last file's imports of `veomni`, for training: `logging` is transformers' own here, and
`is_liger_kernel_available` false.

Every fixture has a checkpoint with published tensor names, and `expected.npz` as in `tests/fixtures/hf`. Continuations
are computed without a cache.

LLaDA2 does not continue prompts and so has no `greedy` and no `smallest_margin`. A token sees those of its own block
and of blocks before it, where block b is positions `b * block_size` up to `(b + 1) * block_size`, counted from the
start of the prompt; a last block may be shorter. The model is given that mask as its own `generate` gives it,
[1, 1, T, T] with 0 where a row sees a column and -inf where it does not. `block_size` and `mask_token_id` are not part
of a published `config.json`, but arguments of that function; here they stand in it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file

from hf_parity.fixtures import (
    NEW_TOKENS,
    SMALLEST_MARGIN,
    SMALLEST_ROUTER_GAP,
    describe,
    first_seed,
    prompts,
    write_expected,
)
from hf_parity.reference import be_quiet, randomize
from hf_parity.routers import Routing, chosen_experts, watch_routers

PROMPT_LENGTHS = (1, 2, 7, 8, 16, 17, 40, 61)  # with blocks of 8, some end with a whole one
_COMMON = {
    "vocab_size": 128, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "tie_word_embeddings": False, "use_bias": False, "use_qkv_bias": False, "attention_dropout": 0.0,
    "embedding_dropout": 0.0, "output_dropout": 0.0, "norm_topk_prob": True, "pad_token_id": 127,
    "torch_dtype": "float32",
}  # fmt: skip
_GROUPED = {
    "head_dim": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_experts": 16, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "score_function": "sigmoid", "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5, "use_rmsnorm": True,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One fixture: the publisher's names, how its routers choose, and its configuration beyond what all have."""

    module: str
    config_class: str
    routing: Routing
    fields: dict[str, Any]

    @property
    def architecture(self) -> str:
        return self.fields["architectures"][0]

    @property
    def block_size(self) -> int | None:
        return self.fields.get("block_size")


_GROUP_LIMITED = Routing(top_k=4, is_sigmoid=True, num_groups=4, kept_groups=2)
CASES = {
    "bailing_v1": Case(
        "bailing_moe", "BailingMoeConfig", Routing(top_k=2),
        {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "num_hidden_layers": 2,
         "intermediate_size": 32, "moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2,
         "num_shared_experts": 2, "first_k_dense_replace": 0, "norm_head": True, "norm_softmax": False,
         "eos_token_id": 127},
    ),
    "bailing_v2": Case(
        "bailing_moe_v2", "BailingMoeV2Config", _GROUP_LIMITED,
        {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "num_hidden_layers": 3,
         "use_qk_norm": True, "norm_head": False, "moe_shared_expert_intermediate_size": 8,
         "eos_token_id": 127} | _GROUPED,
    ),
    "llada2": Case(
        "llada2_moe", "LLaDA2MoeConfig", _GROUP_LIMITED,
        {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "num_hidden_layers": 2,
         "norm_head": False, "norm_softmax": False, "rotary_dim": 8, "use_cache": False, "block_size": 8,
         "mask_token_id": 126} | _GROUPED,
    ),
}  # fmt: skip


def open_code(folder: Path) -> None:
    """Make the files of a folder a package: they import each other as such."""
    package = ModuleType("publishers")
    package.__path__ = [str(folder)]
    sys.modules["publishers"] = package


def build(case: Case) -> Any:
    """The publisher's model, with the weights it starts with."""
    config_class = getattr(importlib.import_module(f"publishers.configuration_{case.module}"), case.config_class)
    config_class.model_type = case.fields["model_type"]
    config = config_class(**_COMMON | case.fields)
    config._attn_implementation = "sdpa"
    config.use_cache = False
    return getattr(importlib.import_module(f"publishers.modeling_{case.module}"), case.architecture)(config).eval()


def set_biases(model: Any, seed: int) -> None:
    """Biases of routers that make most scores negative, as an excluded group must not pass for one that scores 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator) - 0.8)


def block_mask(length: int, block_size: int) -> torch.Tensor:
    """[1, 1, length, length]: 0 where a row sees a column, -inf where it does not."""
    block = torch.arange(length) // block_size
    return torch.where(block[:, None] >= block, 0.0, -torch.inf)[None, None]


def logits_of(model: Any, case: Case, tokens: list[int]) -> torch.Tensor:
    """[T, V], of one pass over all tokens."""
    mask = None if case.block_size is None else block_mask(len(tokens), case.block_size)
    with torch.no_grad():
        return model(torch.tensor([tokens]), attention_mask=mask).logits[0]


def continue_greedily(model: Any, case: Case, prompt: list[int]) -> tuple[list[int], float]:
    """The next tokens of a prompt, and the smallest margin by which one of them won."""
    tokens, margin = list(prompt), float("inf")
    for _ in range(NEW_TOKENS):
        best = logits_of(model, case, tokens)[-1].topk(2)
        tokens.append(int(best.indices[0]))
        margin = min(margin, float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], margin


def make_case(case: Case, directory: Path, seed: int) -> bool:
    """Write one checkpoint and what it computes; returns whether everything chosen there was chosen clearly."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = build(case)
    randomize(model, seed)
    set_biases(model, seed)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    config = case.fields | _COMMON
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    model = build(case)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    asked = prompts(PROMPT_LENGTHS, _COMMON["vocab_size"], seed)
    more, is_clear = {}, True
    with watch_routers(model) as seen:
        logits = [logits_of(model, case, prompt).numpy() for prompt in asked]
        if case.block_size is None:
            greedy, margins = zip(*(continue_greedily(model, case, prompt) for prompt in asked), strict=True)
            more = {"greedy": np.asarray(greedy, np.int32), "smallest_margin": np.float32(min(margins))}
            is_clear = min(margins) > SMALLEST_MARGIN
    chosen = chosen_experts(seen, case.routing)
    more["smallest_router_gap"] = np.float32(chosen.smallest_gap)
    write_expected(directory, asked, logits, **more)
    return is_clear and chosen.uses_every_expert and chosen.smallest_gap > SMALLEST_ROUTER_GAP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, required=True, help="the folder with the publishers' files")
    parser.add_argument("--output", type=Path, default=Path("tests/fixtures/hf_remote"))
    parser.add_argument("--only", action="append", choices=CASES, help="write only this case; may be repeated")
    arguments = parser.parse_args()
    be_quiet()
    open_code(arguments.code)
    for name in arguments.only or CASES:
        directory = arguments.output / name
        seed = first_seed(lambda seed, name=name, path=directory: make_case(CASES[name], path, seed))
        print(f"{name}: {describe(directory, seed)}")


if __name__ == "__main__":
    main()
