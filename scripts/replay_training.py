"""Train the embedded model by policy gradients several times, each with another way of decoding, and compare.

All runs have the same seeds; one decodes plainly, the others with drafts, in another order, or in a pool that preempts.
After every update their tokens must be equal, and at the end their weights: the loss takes log probabilities from a
trainer's forward pass alone, with rows in one order. A token that differs must be a near tie: the tokens of the plain
run are taken over, and it is counted. Any other difference ends the program with an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.models.training import logits
from jaxinfer.sampling.noise import gumbel

GROUP, PROMPTS, MAX_TOKENS, WIDTH, TEMPERATURE = 4, 4, 24, 64, 1.0
TIE = 1e-4
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-grams": {"speculative_config": {"method": "ngram"}},
    "draft model": {"speculative_config": {"method": "draft_model", "model": "tiny-draft"}},
    "EAGLE-3": {"speculative_config": {"method": "eagle3", "model": "tiny-eagle3"}},
    "another order": {"max_num_seqs": 6},
    "preemption": {"kv_cache_tokens": 128, "max_num_batched_tokens": 24},
}


class Run:
    """A training run: an engine, and the weights that it shares with its trainer."""

    def __init__(self, name: str, config: Any, graph: nnx.GraphDef, state: nnx.State) -> None:
        self.name, self.graph, self.state = name, graph, state
        self.llm = LLM(
            model=(config, state),
            skip_tokenizer_init=True,
            **{"max_model_len": WIDTH, "max_num_seqs": 16, **RUNS[name]},
        )
        self.optimizer = optax.adam(1e-5)
        self.moments = self.optimizer.init(state)
        self.update = jax.jit(self._updated)
        self.ties = 0

    def rollout(self, prompts: list[list[int]], number: int) -> list[list[list[int]]]:
        """Return the tokens of GROUP samples of each prompt."""
        params = [
            SamplingParams(
                n=GROUP, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=(number * len(prompts) + place) * GROUP,
                ignore_eos=True,
            )
            for place in range(len(prompts))
        ]  # fmt: skip
        order = list(range(len(prompts)))
        if self.name == "another order":
            order = order[::-1]
        outputs = self.llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
        found = {
            place: [each.token_ids for each in output.outputs] for place, output in zip(order, outputs, strict=True)
        }
        return [found[place] for place in range(len(prompts))]

    def _updated(
        self, state: nnx.State, moments: optax.OptState, tokens: jax.Array, weights: jax.Array
    ) -> tuple[nnx.State, optax.OptState]:
        def loss(state: nnx.State) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(WIDTH - 1), (len(tokens), WIDTH - 1))
            found = logits(nnx.merge(self.graph, state), tokens[:, :-1], positions)
            chosen = jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0] - jax.nn.logsumexp(found, axis=-1)
            return -jnp.sum(chosen * weights[:, 1:]) / MAX_TOKENS / len(tokens)

        changes, moments = self.optimizer.update(jax.grad(loss)(state), moments)
        trained: Any = optax.apply_updates(state, changes)
        return trained, moments

    def learn(self, prompts: list[list[int]], samples: list[list[list[int]]], number: int) -> None:
        """Raise the probability of samples with more different tokens than their group's mean."""
        tokens, weights = (np.zeros((len(prompts) * GROUP, WIDTH), kind) for kind in (np.int32, np.float32))
        for place, (prompt, group) in enumerate(zip(prompts, samples, strict=True)):
            rewards = np.array([len(set(sample)) / len(sample) for sample in group])
            for index, sample in enumerate(group):
                row, answer = place * GROUP + index, slice(len(prompt), len(prompt) + len(sample))
                tokens[row, : answer.stop] = [*prompt, *sample]
                weights[row, answer] = rewards[index] - rewards.mean()
        self.state, self.moments = self.update(self.state, self.moments, tokens, weights)
        self.llm.update_weights(self.state, version=number + 1)


def margin(run: Run, prompt: list[int], ours: Sequence[int], theirs: Sequence[int], seed: int) -> float:
    """Return by how much the scores of two samples differ at the first token that does."""
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    tokens = np.zeros((1, WIDTH), np.int32)
    tokens[0, : len(prompt) + place] = [*prompt, *ours[:place]]
    position = len(prompt) + place
    found = logits(nnx.merge(run.graph, run.state), jnp.asarray(tokens), jnp.arange(WIDTH)[None])[0, position - 1]
    key = jnp.asarray(divmod(seed, 2**32), jnp.uint32)
    scores = found + TEMPERATURE * gumbel(key, jnp.int32(position), jnp.arange(len(found)))
    return abs(float(scores[ours[place]] - scores[theirs[place]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=50)
    options = parser.parse_args()
    config, model = load_checkpoint(embedded_checkpoint(), dtype="float32")
    graph, state = nnx.split(model)
    rng = np.random.default_rng(0)
    runs = [Run(name, config, graph, jax.tree.map(jnp.copy, state)) for name in RUNS]
    compared = 0
    for number in range(options.updates):
        prompts = [rng.integers(0, 1000, length).tolist() for length in rng.integers(8, WIDTH - MAX_TOKENS, PROMPTS)]
        wanted = runs[0].rollout(prompts, number)
        for run in runs:
            samples = wanted if run is runs[0] else run.rollout(prompts, number)
            for place, (prompt, group) in enumerate(zip(prompts, samples, strict=True)):
                for index, sample in enumerate(group):
                    compared += len(sample) * (run is not runs[0])
                    if sample != wanted[place][index]:
                        seed = (number * len(prompts) + place) * GROUP + index
                        distance = margin(run, prompt, sample, wanted[place][index], seed)
                        print(
                            f"update {number}, {run.name}: sample {place}.{index} differs at a margin of {distance:.1e}"
                        )
                        if distance > TIE:
                            raise SystemExit("this is no near tie")
                        run.ties += 1
            run.learn(prompts, wanted, number)
    digests = {run.name: run.llm.weights_digest() for run in runs}
    for run in runs:
        metrics = run.llm.get_metrics()
        print(
            f"{run.name:14} digest {digests[run.name][:16]}  ties {run.ties}  accepted drafts "
            f"{metrics.spec_decode_num_accepted_tokens}  preemptions {metrics.num_preemptions_total}"
        )
    print(f"{options.updates} updates, {compared} tokens compared")
    if len(set(digests.values())) != 1:
        raise SystemExit("the weights differ")


if __name__ == "__main__":
    main()
