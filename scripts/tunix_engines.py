"""GRPO by tunix on the embedded model, with tunix's own rollout engine and with this one: reward and seconds a step.

tunix's Qwen3 rotates by a base of 1,000,000 whatever its configuration says; here it gets the embedded model's. tunix's
own engine leaves out the token that ends an answer, so a trainer sees it from this engine alone.

Runs in the environment of `make test-tunix`: .venv-tunix/bin/python scripts/tunix_engines.py
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from transformers import AutoTokenizer

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.checkpoint.export import export_hf
from jaxinfer.integrations.tunix import JaxinferRollout

QUESTIONS = [
    "Are you a robot?", "How old is the lighthouse?", "Who works in the library?", "What is the harbour like?",
    "Where can I buy bread?", "Tell me about the town.", "What do you do all day?", "Is the museum open?",
]  # fmt: skip
GROUP, WORDS, MAX_TOKENS, MAX_PROMPT = 8, 20, 48, 32
cluster: Any = importlib.import_module("tunix.rl.rl_cluster")
grpo: Any = importlib.import_module("tunix.rl.grpo.grpo_learner")
base: Any = importlib.import_module("tunix.rl.rollout.base_rollout")
qwen3: Any = importlib.import_module("tunix.models.qwen3.model")
_ROTATE = qwen3.apply_rope
qwen3_params: Any = importlib.import_module("tunix.models.qwen3.params")


def actor(folder: str, mesh: Mesh) -> Any:
    """The embedded model as tunix has it."""
    config = load_checkpoint(embedded_checkpoint())[0]
    qwen3.apply_rope = functools.partial(_ROTATE, rope_theta=int(config.rope.theta))
    own = qwen3.ModelConfig(
        num_layers=config.num_layers, vocab_size=config.vocab_size, embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size, num_heads=config.num_heads, head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads, rope_theta=int(config.rope.theta), norm_eps=config.rms_norm_eps,
        use_tied_embedding=True,
    )  # fmt: skip
    return qwen3_params.create_model_from_safe_tensors(folder, own, mesh, dtype=np.float32)


class Rewards:
    """1 for an answer of WORDS words, less for others; keeps the mean of each step and when it was asked for."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.times: list[float] = []

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        found = [max(0.0, 1 - abs(len(text.split()) - WORDS) / WORDS) for text in completions]
        self.means.append(statistics.mean(found))
        self.times.append(time.perf_counter())
        return found


def train(engine: Any, folder: str, steps: int) -> Rewards:
    mesh, rewards = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")), Rewards()
    rewards.__name__ = "words"  # pyright: ignore[reportAttributeAccessIssue]
    training = cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(2e-5), eval_every_n_steps=10**6, max_steps=steps, mini_batch_size=len(QUESTIONS),
        train_micro_batch_size=len(QUESTIONS), rollout_micro_batch_size=len(QUESTIONS),
        compute_logps_micro_batch_size=len(QUESTIONS),
    )  # fmt: skip
    roles = (cluster.Role.ACTOR, cluster.Role.REFERENCE, cluster.Role.ROLLOUT)
    made = cluster.RLCluster(
        actor=actor(folder, mesh), reference=actor(folder, mesh),
        tokenizer=AutoTokenizer.from_pretrained(embedded_checkpoint()),
        cluster_config=cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), rollout_engine=engine, training_config=training,
            rollout_config=base.RolloutConfig(
                max_tokens_to_generate=MAX_TOKENS, max_prompt_length=MAX_PROMPT, temperature=1.0,
                kv_cache_size=MAX_TOKENS + MAX_PROMPT,
            ),
        ),
    )  # fmt: skip
    learner = grpo.GRPOLearner(
        rl_cluster=made, reward_fns=rewards, algo_config=grpo.GRPOConfig(num_generations=GROUP, beta=0.0)
    )
    prompts = [f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS]
    with mesh:
        learner.train([{"prompts": np.array(prompts)} for _ in range(steps)])
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config, model = load_checkpoint(embedded_checkpoint(), dtype="float32")
        export_hf(model, config, folder)
        for name, engine in (
            ("tunix", "vanilla"),
            ("jaxinfer", functools.partial(JaxinferRollout, max_num_seqs=64)),
            (
                "jaxinfer, n-grams",
                functools.partial(JaxinferRollout, max_num_seqs=64, speculative_config={"method": "ngram"}),
            ),
        ):  # fmt: skip
            rewards = train(engine, folder, options.steps)
            seconds = np.diff(rewards.times)[len(rewards.times) // 3 :]
            found[name] = {"rewards": rewards.means, "seconds": [float(each) for each in np.diff(rewards.times)]}
            tenth = max(1, options.steps // 10)
            print(
                f"{name:18} reward {statistics.mean(rewards.means[:tenth]):.3f} -> "
                f"{statistics.mean(rewards.means[-tenth:]):.3f}   {statistics.median(seconds):.2f} s a step",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
