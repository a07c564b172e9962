"""Group-relative policy gradients (GRPO) on the embedded model: trainer and sampler in one process, one set of weights.

The model learns to answer in about twenty words. Each update samples a group of answers to each prompt, scores their
texts, and raises the probability of those above their group's mean. Writes a plot of the reward.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.models.training import logits

QUESTIONS = [
    "Are you a robot?", "How old is the lighthouse?", "Who works in the library?", "What is the harbour like?",
    "Where can I buy bread?", "Tell me about the town.", "What do you do all day?", "Is the museum open?",
]  # fmt: skip
GROUP, WORDS, MAX_TOKENS, WIDTH = 8, 20, 48, 96  # answers to a prompt, their aim, their limit, tokens of a row
CLIP = 0.2


def reward(text: str) -> float:
    """1 for an answer of WORDS words, less for shorter and longer ones."""
    return max(0.0, 1 - abs(len(text.split()) - WORDS) / WORDS)


def rollout(llm: LLM, step: int) -> tuple[dict[str, np.ndarray], float]:
    """Sample and score groups of answers; returns padded rows and the mean reward."""
    prompts = [f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS]
    params = [
        SamplingParams(
            n=GROUP, max_tokens=MAX_TOKENS, temperature=1.0, seed=(step * len(prompts) + i) * GROUP, logprobs=0
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    shape = (len(prompts) * GROUP, WIDTH)
    rows = {name: np.zeros(shape, np.float32) for name in ("sampled_logprobs", "advantages", "weights")}
    tokens, rewards = np.zeros(shape, np.int32), []
    for group, output in enumerate(outputs):
        found = np.array([reward(completion.text) for completion in output.outputs])
        rewards += found.tolist()
        for index, completion in enumerate(output.outputs):
            row, start = group * GROUP + index, len(output.prompt_token_ids)
            answer = slice(start, start + len(completion.token_ids))
            tokens[row, :start], tokens[row, answer] = output.prompt_token_ids, completion.token_ids
            noted = zip(completion.logprobs or (), completion.token_ids, strict=True)
            rows["sampled_logprobs"][row, answer] = [entry[token].logprob for entry, token in noted]
            rows["advantages"][row, answer] = (found[index] - found.mean()) / (found.std() + 1e-4)
            rows["weights"][row, answer] = 1
    return {"tokens": tokens, **rows}, float(np.mean(rewards))


def loss(state: nnx.State, graph: nnx.GraphDef, rows: dict[str, jax.Array]) -> jax.Array:
    """The clipped surrogate of PPO, over the tokens of all answers."""
    tokens, after = rows["tokens"][:, :-1], rows["tokens"][:, 1:]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    found = logits(nnx.merge(graph, state), tokens, positions)  # padding is after a row, where nothing sees it
    chosen = jnp.take_along_axis(found, after[..., None], axis=-1)[..., 0]
    logprobs = chosen - jax.nn.logsumexp(found, axis=-1)
    sampled, advantages, weights = (rows[name][:, 1:] for name in ("sampled_logprobs", "advantages", "weights"))
    ratio = jnp.exp(jnp.where(weights > 0, logprobs - sampled, 0.0))
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    return -jnp.sum(gain * weights) / jnp.sum(weights)


def plot(rewards: list[float], path: Path) -> None:
    """Write the reward of every update as a picture."""
    width = 560 / max(1, len(rewards) - 1)
    points = " ".join(f"{40 + width * i:.0f},{220 - 200 * reward:.0f}" for i, reward in enumerate(rewards))
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="620" height="260" font-family="sans-serif" font-size="12">'
        '<rect width="620" height="260" fill="white"/><path d="M40 20V220H600" fill="none" stroke="black"/>'
        '<text x="30" y="24" text-anchor="end">1</text><text x="30" y="224" text-anchor="end">0</text>'
        f'<text x="40" y="240">0</text><text x="600" y="240" text-anchor="end">{len(rewards)} updates</text>'
        '<text x="320" y="255" text-anchor="middle">mean reward</text>'
        f'<polyline points="{points}" fill="none" stroke="#1f6feb" stroke-width="2"/></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--plot", type=Path, default=Path("grpo.svg"))
    options = parser.parse_args()
    config, model = load_checkpoint(embedded_checkpoint(), dtype="float32")
    graph, state = nnx.split(model)
    llm = LLM(model=(config, state), tokenizer=embedded_checkpoint(), max_model_len=WIDTH, max_num_seqs=64)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))
    moments = optimizer.init(state)

    @jax.jit
    def update(state: nnx.State, moments: optax.OptState, rows: dict[str, jax.Array]):
        changes, moments = optimizer.update(jax.grad(loss)(state, graph, rows), moments)
        return optax.apply_updates(state, changes), moments

    rewards, began = [], time.perf_counter()
    for step in range(options.updates):
        rows, mean = rollout(llm, step)
        state, moments = update(state, moments, rows)
        llm.update_weights(state, version=step + 1)  # by reference: the engine computes with the trainer's own arrays
        rewards.append(mean)
        print(f"update {step + 1:3}  reward {mean:.3f}  {'#' * round(40 * mean)}", flush=True)
    plot(rewards, options.plot)
    print(
        f"{time.perf_counter() - began:.0f} s; reward {rewards[0]:.3f} -> {np.mean(rewards[-10:]):.3f}; {options.plot}"
    )


if __name__ == "__main__":
    main()
