"""Watching a training: the share of held-out answers that greedy decoding gets right, for kinds with one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerFast

from jaxinfer.attention.dense import CausalAttend
from training.corpus import held_out_cases
from training.loop import Params, module_of
from training.packing import Document, pack_rows
from training.tokenizer import encode_document

LENGTH = 256


def make_watch(
    graph: nnx.GraphDef, tokenizer: PreTrainedTokenizerFast, kinds: Sequence[str], count: int
) -> Callable[[Params], dict[str, float]]:
    """A function that gives, per kind, the share of `count` held-out answers of which every token is the most probable
    one after the right tokens before it, which is the same as a right greedy answer."""
    cases = {
        kind: [Document(*encode_document(tokenizer, sample)) for sample in held_out_cases(kind, count, seed=1)]
        for kind in kinds
    }
    packed = {
        kind: pack_rows([[each] for each in documents if len(each.ids) <= LENGTH], LENGTH, 0.0)
        for kind, documents in cases.items()
    }

    @jax.jit
    def right(params: Params, ids: jax.Array, positions: jax.Array, documents: jax.Array, weights: jax.Array):
        model = module_of(graph, params)
        hidden = model(ids, positions, CausalAttend(documents))  # pyright: ignore[reportCallIssue]
        best = jnp.argmax(model.logits(hidden), axis=-1)  # pyright: ignore[reportAttributeAccessIssue]
        hits = (best[:, :-1] == ids[:, 1:]) | (weights[:, 1:] == 0)
        return jnp.all(hits, axis=1)

    def watch(params: Params) -> dict[str, float]:
        return {
            kind: float(np.mean(right(params, rows.ids, rows.positions, rows.documents, rows.weights)))
            for kind, rows in packed.items()
        }

    return watch
