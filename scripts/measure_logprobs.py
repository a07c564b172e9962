"""Compare log probabilities of a trainer's forward pass with those that the engine notes as it samples.

Every way of decoding samples at temperature 1: alone, in a batch, from cached prefixes, as samples of one prompt and as
branches, with roomy launches and with short chunks in a pool that preempts, for each drafter. Beside it is what
rounding alone does: the trainer's forward pass against itself in another batch and width, on the same tokens. Where
the largest difference is more than three times that of these two shapes, the trainer computes its token in 42 shapes.

In mixtures, a router's near tie may be decided either way; tokens that differ by more than `APART` are counted apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from jaxinfer import LLM, CompletionOutput, SamplingParams
from jaxinfer.bench.environment import describe_environment
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.training import logits

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
WIDTH, ROWS, MAX_TOKENS = 96, 8, 32
# Small models compute the same, to the last bit, in all batches of 128 tokens and more.
NARROW = 64
APART = 1e-3
# Batches and widths in which a token is computed whose difference is more than so many times that of two shapes.
SHAPES, MUCH = tuple(product((1, 2, 3, 4, 6, 8, 16), (64, 80, 96, 128, 192, 256))), 3.0
ROOMY: dict[str, Any] = {"max_num_batched_tokens": 256, "kv_cache_tokens": 2048}
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 24, "kv_cache_tokens": 160}
TREES = {"num_speculative_tokens": 12, "tree_depth": 3, "tree_top_k": 4}


class Sampled(NamedTuple):
    """A sampled sequence, with the log probability of each token after its prompt."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def drafters(model: str, is_embedded: bool) -> dict[str, Any]:
    """Return configurations of speculative decoding, by name; None is plain decoding."""
    if not is_embedded:
        return {"plain": None, "ngram": {"method": "ngram"}, "draft model": {"method": "draft_model", "model": model}}
    eagle = {"method": "eagle3", "adaptive": None}
    return {
        "plain": None, "ngram": {"method": "ngram"}, "draft model": {"method": "draft_model"},
        "EAGLE-3 chains": {**eagle, "num_speculative_tokens": 4, "tree_depth": None},
        "EAGLE-3 trees": {**eagle, **TREES},
    }  # fmt: skip


def sampled(prompt: Sequence[int], completion: CompletionOutput) -> Sampled:
    assert completion.logprobs is not None
    noted = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    return Sampled(list(prompt), completion.token_ids, noted)


def ways(llm: LLM, prompts: list[list[int]]) -> Iterator[tuple[str, list[Sampled]]]:
    """Sample in every circumstance that one engine can be in."""

    def params(seed: int, **more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, logprobs=0, ignore_eos=True, **more)

    own = [params(seed) for seed in range(len(prompts))]
    llm.reset_prefix_cache()
    outputs = [llm.generate([prompt], [each], use_tqdm=False)[0] for prompt, each in zip(prompts, own, strict=True)]
    yield "alone", [sampled(output.prompt_token_ids, output.outputs[0]) for output in outputs]
    llm.reset_prefix_cache()
    for name in ("batch", "cached"):
        outputs = llm.generate(prompts, own, use_tqdm=False)
        yield name, [sampled(output.prompt_token_ids, output.outputs[0]) for output in outputs]
    [output] = llm.generate([prompts[0]], params(100, n=4), use_tqdm=False)
    yield "n", [sampled(output.prompt_token_ids, completion) for completion in output.outputs]
    suffixes = [prompt[:3] for prompt in prompts[:4]]
    output = llm.generate_branches(prompts[0], suffixes, params(200), use_tqdm=False)
    yield (
        "branches",
        [
            sampled([*prompts[0], *suffix], completion)
            for suffix, completion in zip(suffixes, output.outputs, strict=True)
        ],
    )


class Trainer:
    """The trainer's forward pass of one model, in batches of one shape."""

    def __init__(self, model: DecoderLM) -> None:
        self._graph, self._state = nnx.split(model)

        @jax.jit
        def logprobs(state: nnx.State, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1), (tokens.shape[0], tokens.shape[1] - 1))
            lengths = jnp.maximum(positions + 1, lengths[:, None])
            found = logits(nnx.merge(self._graph, state), tokens[:, :-1], positions, lengths=lengths)
            chosen = jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]
            return chosen - jax.nn.logsumexp(found, axis=-1)

        self._logprobs = logprobs
        self._turns = model.config.rope.turning_length is not None

    def of(self, sequences: Sequence[Sampled], *, rows: int, width: int) -> list[np.ndarray]:
        """Return log probabilities of the sampled tokens of each sequence."""
        found = []
        for first in range(0, len(sequences), rows):
            part = sequences[first : first + rows]
            tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
            for number, each in enumerate(part):
                tokens[number, : len(each.prompt) + len(each.tokens)] = [*each.prompt, *each.tokens]
                # Read by rotations that depend on it: longrope by that of the whole, the dynamic one by the prompt's.
                lengths[number] = len(each.prompt) + (len(each.tokens) if self._turns else 0)
            logprobs = np.asarray(self._logprobs(self._state, tokens, lengths))
            for row, each in zip(logprobs, part, strict=False):
                found.append(row[len(each.prompt) - 1 : len(each.prompt) + len(each.tokens) - 1])
        return found

    def spread(self, sequences: Sequence[Sampled], token: int) -> float:
        """Return by how much one of the sampled tokens differs between many shapes."""
        found = [
            np.concatenate(self.of(sequences, rows=rows, width=width))[token]
            for rows, width in SHAPES
            if width > max(len(each.prompt) + len(each.tokens) for each in sequences)
        ]
        return float(max(found) - min(found))


def _turns(config: ModelConfig, each: Sampled) -> bool:
    """Whether longrope's frequencies changed on the way: tokens before that were drawn with others than a trainer's."""
    turning = config.rope.turning_length
    return turning is not None and len(each.prompt) <= turning < len(each.prompt) + len(each.tokens)


def summary(differences: np.ndarray, is_mixture: bool) -> dict[str, Any]:
    apart = differences > APART if is_mixture else np.zeros(len(differences), bool)
    kept = differences[~apart]
    return {"tokens": len(kept), "mean": float(kept.mean()), "max": float(kept.max()), "apart": int(apart.sum())}


def measure(name: str, model: str, dtype: str) -> list[dict[str, Any]]:
    """Measure one model; a row for each way of decoding."""
    is_embedded = model == str(embedded_checkpoint())
    config, module = load_checkpoint(model, dtype=dtype)
    trainer, rng = Trainer(module), np.random.default_rng(0)
    most = min(config.max_position_embeddings, WIDTH)
    prompts = [rng.integers(0, min(config.vocab_size, 1000), n).tolist() for n in (24, 9, 17, 5, 31, 12)]
    rows = []
    for drafter, speculative in drafters(model, is_embedded).items():
        for room, limits in (("roomy", ROOMY), ("chunks, preemption", TIGHT)):
            if not is_embedded and (drafter == "plain") != (room == "roomy"):
                continue  # of other families: plain decoding with room, drafters without
            llm = LLM(
                model, skip_tokenizer_init=True, dtype=dtype, max_model_len=most, max_num_seqs=6, page_size=8,
                speculative_config=speculative, **limits,
            )  # fmt: skip
            for way, sampled_sequences in ways(llm, prompts):
                sequences = [each for each in sampled_sequences if not _turns(config, each)]
                if not sequences:
                    continue
                noted = np.concatenate([each.logprobs for each in sequences])
                ours = np.concatenate(trainer.of(sequences, rows=ROWS, width=WIDTH))
                again = np.concatenate(trainer.of(sequences, rows=1, width=NARROW))
                is_mixture = config.experts is not None
                rows.append({
                    "model": name, "dtype": dtype, "drafter": drafter, "room": room, "way": way,
                    "sampler": summary(np.abs(ours - noted), is_mixture),
                    "rounding": summary(np.abs(ours - again), is_mixture),
                })  # fmt: skip
                if rows[-1]["sampler"]["max"] > MUCH * rows[-1]["rounding"]["max"]:
                    rows[-1]["spread"] = trainer.spread(sequences, int(np.abs(ours - noted).argmax()))
            if room != "roomy":
                rows[-1]["preemptions"] = llm.get_metrics().num_preemptions_total
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="trainer's minus sampler's log probability, and the trainer's against itself")
    for column in (
        "model",
        "drafter",
        "room",
        "way",
        "tokens",
        "mean",
        "largest",
        "x mean",
        "x largest",
        "apart",
        "42 shapes",
    ):
        found.add_column(column, justify="left" if column in ("model", "drafter", "room", "way") else "right")
    for row in rows:
        sampler, rounding = row["sampler"], row["rounding"]
        found.add_row(
            row["model"], row["drafter"], row["room"], row["way"], str(sampler["tokens"]), f"{sampler['mean']:.1e}",
            f"{sampler['max']:.1e}", _ratio(sampler["mean"], rounding["mean"]), _ratio(sampler["max"], rounding["max"]),
            f"{sampler['apart']}/{rounding['apart']}", f"{row['spread']:.1e}" if "spread" in row else "",
        )  # fmt: skip
    return found


def _ratio(sampler: float, rounding: float) -> str:
    """Return the ratio in words; a small model may compute the same in both shapes, to the last bit."""
    return f"{sampler / rounding:.2f}" if rounding else "same" if sampler == 0 else "to none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of fixtures, or tiny; default: all")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folders = {path.name: str(path) for place in ("hf", "hf_remote") for path in sorted((FIXTURES / place).iterdir())}
    known = {
        "tiny": str(embedded_checkpoint()),
        **{name: path for name, path in folders.items() if Path(path).is_dir()},
    }
    rows: list[dict[str, Any]] = []
    console = Console(width=160)
    for name in options.models or known:
        if name != "tiny" and load_checkpoint(known[name])[0].mask_token_id is not None:
            continue  # a diffusion model
        rows += measure(name, known[name], options.dtype)
        console.print(table(rows[-1:]))
        if options.json is not None:
            report = {"environment": describe_environment(), "rows": rows}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        jax.clear_caches()
    console.print(table(rows))


if __name__ == "__main__":
    main()
