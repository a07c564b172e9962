"""One model on several devices, in one process or two, gives the tokens that one device gives."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.checkpoint.export import export_head, export_hf
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import RopeConfig
from tests.builders import model_config, random_model
from tests.speculative.builders import random_head

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 128, "intermediate_size": 96,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
# A process compiles as the test does, and where it does.
COMPILING = (
    "jax_disable_most_optimizations", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tensor_parallel") / "model"
    config = ModelConfig.from_hf(CONFIG)
    export_hf(random_model(config), config, directory)
    return directory


def start(
    checkpoint: Path, size: int, *, devices: int, processes: int = 1, process: int = 0, port: int = 0,
    **options: Any,
):  # fmt: skip
    """A process with an engine that has these options."""
    root = WORKER.parent.parent
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONPATH": str(root),
        **{name.upper(): str(jax.config.values[name]) for name in COMPILING},
    }  # fmt: skip
    command = [sys.executable, WORKER, checkpoint, size, processes, process, port, json.dumps(options)]
    return subprocess.Popen([*map(str, command)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(worker: subprocess.Popen) -> dict:
    out, err = worker.communicate(timeout=300)
    assert worker.returncode == 0, err.decode()[-2000:]
    return json.loads(out.decode().strip().splitlines()[-1])


@pytest.fixture(scope="module")
def of_one(checkpoint) -> dict:
    return finish(start(checkpoint, 1, devices=1))


@pytest.fixture(scope="module")
def alone(of_one) -> list[list[int]]:
    return of_one["tokens"]


@pytest.fixture(scope="module")
def of_four(checkpoint) -> dict:
    return finish(start(checkpoint, 4, devices=4))


def test_four_devices_give_the_same_tokens_with_two_kv_heads_kept_twice(of_four, alone):
    assert (of_four["tokens"], of_four["devices"]) == (alone, 4)


def test_four_devices_give_the_same_branches_in_either_mode(of_four, of_one):
    one, other = of_one["branches"].values()
    assert one == other and [len(tokens) for tokens in one] == [12, 5, 9]
    assert of_four["branches"] == of_one["branches"]


def test_draws_are_bound_on_eight_devices_as_on_one(checkpoint):
    """Whose words are no whole number of bits' words; counts lie with the words that they are of."""
    workers = [start(checkpoint, size, devices=size) for size in (1, 8)]
    one, eight = map(finish, workers)
    assert (eight["bound"], eight["counts"]) == (one["bound"], [4, CONFIG["vocab_size"] // 8])
    assert eight["listed"] == one["listed"] and [len(entry) >= 5 for entry in one["listed"]] == [True] * 12
    assert eight["tokens"] == one["tokens"] != one["bound"] and one["counts"] == [4, CONFIG["vocab_size"]]


def test_devices_exchange_the_sums_of_two_products_a_layer_and_no_weights_and_no_kv(of_four):
    exchanges = of_four["exchanges"]
    rows, hidden = 4, CONFIG["hidden_size"]
    assert exchanges.pop(f"{hidden},{rows} all-reduce") == 2 * CONFIG["num_hidden_layers"]
    # Of the embedding, whose words are split.
    assert exchanges.pop(f"{rows},{hidden} all-reduce") == 1
    # The rest is sampling: logits for rows that are not greedy, and what is smaller.
    assert exchanges.pop(f"{rows},{CONFIG['vocab_size']} all-gather") > 0
    sizes = [math.prod(map(int, shape.split(","))) for shape, _ in map(str.split, exchanges)]
    assert max(sizes) < rows * CONFIG["vocab_size"]


def test_four_devices_that_speculate_give_the_same_tokens(checkpoint, alone, of_one):
    # The model drafts for itself: what it drafts is wrong where devices do not agree on what was drafted before.
    itself = {"method": "draft_model", "model": str(checkpoint), "adaptive": None}
    found = finish(start(checkpoint, 4, devices=4, speculative_config=itself))
    drafted, accepted = found["drafted"]
    assert found["tokens"] == alone and drafted == accepted > 10
    assert found["branches"] == of_one["branches"]


@pytest.mark.slow
def test_four_devices_that_draft_trees_draft_and_accept_what_one_does(checkpoint, alone, of_one, tmp_path):
    head = random_head(ModelConfig.from_hf(CONFIG))
    export_head(head, tmp_path / "head")
    trees = {
        "method": "eagle3", "model": str(tmp_path / "head"), "adaptive": None, "num_speculative_tokens": 8,
        "tree_depth": 2, "tree_top_k": 3,
    }  # fmt: skip
    workers = [start(checkpoint, size, devices=size, speculative_config=trees) for size in (1, 4)]
    one, four = map(finish, workers)
    assert one["tokens"] == four["tokens"] == alone
    assert one["branches"] == four["branches"] == of_one["branches"]
    assert one["drafted"] == four["drafted"] and four["drafted"][0] > 100


def test_two_processes_of_one_device_each_give_the_same_tokens(checkpoint, alone):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    workers = [start(checkpoint, 2, devices=1, processes=2, process=i, port=port) for i in range(2)]
    found = [finish(worker) for worker in workers]
    assert [(one["tokens"], one["devices"]) for one in found] == [(alone, 2)] * 2


def test_four_devices_that_share_every_expert_denoise_the_same_tokens_in_as_many_rounds(tmp_path):
    config = ModelConfig.from_hf(
        CONFIG | {"architectures": ["LLaDA2MoeModelLM"], "moe_intermediate_size": 24, "num_experts": 8,
                  "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "block_size": 8, "mask_token_id": 127}
    )  # fmt: skip
    export_hf(random_model(config), config, tmp_path / "model")
    often = {"threshold": 0.05}
    workers = [start(tmp_path / "model", size, devices=size, diffusion_config=often) for size in (1, 4)]
    one, four = map(finish, workers)
    assert (four["tokens"], four["forwards"]) == (one["tokens"], one["forwards"]) and four["devices"] == 4
    # Several tokens in some rounds, and not the same for all.
    assert 10 < four["forwards"] < 36 and len(set(sum(four["tokens"], []))) > 6
    # Of experts only sums are sent: that of the routed ones and that of the shared one in one exchange of a pair, which
    # has no shape of its own and is not counted here, beside those of two attentions, an MLP and the embedding.
    rows, hidden = 4, CONFIG["hidden_size"]
    sums = [
        count for shape, count in four["exchanges"].items() if shape.endswith(" all-reduce") and str(hidden) in shape
    ]
    assert sum(sums) == 3 + 1
    sizes = [math.prod(map(int, exchange.split()[0].split(","))) for exchange in four["exchanges"]]
    assert max(sizes) <= rows * CONFIG["vocab_size"]


def test_four_devices_denoise_whole_sequences_with_smoothed_embeddings_as_one_does(tmp_path):
    rope = RopeConfig(max_position_embeddings=256, original_max_position_embeddings=256)
    config = model_config("LLaDAMoEModelLM", num_heads=8, hidden_size=128, vocab_size=128, mask_token_id=127, rope=rope)
    export_hf(random_model(config), config, tmp_path / "model")
    options: dict[str, Any] = {
        "max_num_batched_tokens": 128,
        "diffusion_config": {
            "block_size": 8, "threshold": 0.05, "threshold_decay": 0.5, "prefix_look": 2, "after_look": 3,
            "cont_weight": 0.3, "warmup_steps": 2,
        },
    }  # fmt: skip
    workers = [start(tmp_path / "model", size, devices=size, **options) for size in (1, 4)]
    one, four = map(finish, workers)
    assert (four["tokens"], four["forwards"]) == (one["tokens"], one["forwards"]) and four["devices"] == 4
    assert 6 < four["forwards"] < 36 and len(set(sum(four["tokens"], []))) > 6


def test_more_devices_than_there_are_is_an_error_that_says_how_many(checkpoint):
    worker = start(checkpoint, 2, devices=1)
    _, err = worker.communicate(timeout=300)
    assert worker.returncode == 1
    assert "tensor_parallel_size=2, but there are 1 devices; with JAX_NUM_CPU_DEVICES=2 in the env" in err.decode()
