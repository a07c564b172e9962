"""Held-out figures of a checkpoint: scores of greedy answers through the engine, and perplexity."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxinfer import LLM, SamplingParams
from jaxinfer.attention.dense import CausalAttend
from jaxinfer.checkpoint.load import load_checkpoint
from training.corpus import KINDS, MIXTURE, Sample, held_out_cases, mixture_of
from training.packing import Document, pack_rows
from training.scores import CHECKS, Score, score
from training.tokenizer import encode_document, load_tokenizer
from training.tool_format import knows_tools

MAX_TOKENS = 320
# The facts of the small world have only so many held-out wordings.
FEWER_CASES = {"world": 50}


def evaluate(checkpoint: Path, cases: int) -> tuple[list[Score], dict[str, list[dict[str, Any]]]]:
    """`scores_of` a checkpoint in the kinds that it was trained on, printed."""
    kinds = mixture_of(knows_tools(load_tokenizer(checkpoint).chat_template))
    scores, shown = scores_of(LLM(checkpoint, max_num_seqs=64), cases, kinds)
    for each in scores:
        print(f"{each.kind:21s} {each.check:48s} {each.right:4d}/{each.cases} {each.share:7.1%}", flush=True)
    return scores, shown


def scores_of(
    llm: LLM, cases: int, kinds: Collection[str] = MIXTURE
) -> tuple[list[Score], dict[str, list[dict[str, Any]]]]:
    """Scores of greedy answers to at most `cases` prompts of every kind among `kinds` that has checks, and per kind the
    first three cases with the answers that the model gave."""
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    scores: list[Score] = []
    shown: dict[str, list[dict[str, Any]]] = {}
    for kind in dict.fromkeys(kind for kind, *_ in CHECKS if kind in kinds):
        samples = held_out_cases(kind, min(cases, FEWER_CASES.get(kind, cases)))
        outputs = llm.chat([sample.prompt for sample in samples], greedy, use_tqdm=False)
        answers = [output.outputs[0].text for output in outputs]
        scores += score(kind, samples, answers)
        shown[kind] = [_shown(sample, answer) for sample, answer in list(zip(samples, answers, strict=True))[:3]]
    return scores, shown


def _shown(sample: Sample, answer: str) -> dict[str, Any]:
    return {"prompt": _asked(sample), "answer": answer, "expected": sample.answer}


def _asked(sample: Sample) -> str:
    """The last turn of a prompt; of one with tools, all turns, under the names of their roles."""
    if sample.talk is None:
        return sample.prompt[-1]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in sample.prompt)


def perplexity(checkpoint: Path, cases: int) -> tuple[float, float]:
    """Held-out perplexity per token: over all tokens but each document's first, and over the answers' tokens alone.

    `cases` documents per kind, weighted as `MIXTURE` weighs them: without tools, so that models are comparable.
    """
    config, model = load_checkpoint(checkpoint, dtype="float32", mesh=Mesh(np.array(jax.devices()[:1]), ("tensor",)))
    tokenizer = load_tokenizer(checkpoint)

    @jax.jit
    def losses(ids: jax.Array, positions: jax.Array, documents: jax.Array) -> jax.Array:
        logits = model.logits(model(ids, positions, CausalAttend(documents)))
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])

    totals = {"all": [0.0, 0.0], "answers": [0.0, 0.0]}
    for kind, share in MIXTURE.items():
        rng = random.Random(f"perplexity:{kind}")
        for sample in (KINDS[kind](rng, True) for _ in range(cases)):
            document = Document(*encode_document(tokenizer, sample))
            length = 128 * math.ceil(len(document.ids) / 128)
            if length > config.max_position_embeddings:
                continue
            rows = pack_rows([[document]], length, 1.0)
            found = losses(jnp.asarray(rows.ids), jnp.asarray(rows.positions), jnp.asarray(rows.documents))[0]
            inside = jnp.asarray(rows.documents[0, 1:] > 0)
            written = pack_rows([[document]], length, 0.0).weights[0, 1:] > 0
            for name, wanted in (("all", inside), ("answers", jnp.asarray(written))):
                totals[name][0] += share * float(jnp.sum(found * wanted))
                totals[name][1] += share * float(jnp.sum(wanted))
    everything, answers = (math.exp(total / count) for total, count in totals.values())
    return everything, answers
