"""Acceptance of a draft model's proposals, measured token by token along text that the target wrote itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.attention.dense import CausalAttend
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.sampler import SamplingBatch, perturbed
from training.corpus import Sample, held_out_conversations
from training.distillation import MAX_TOKENS, own_answers
from training.tokenizer import load_tokenizer
from training.tool_format import knows_tools

CASES = 300
TEMPERATURE = 0.8
DRAFTED = 4
"""Tokens of a draft in the figure of chains."""
PADDED_TO = 128
SAME_DRAWS = 0.98
"""Share of the target's tokens that must be found again: the rest is rounding, of two ways to compute one model."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposals:
    """What would have been accepted at each of N tokens that the target wrote, of a draft model that saw all tokens
    before it."""

    redrawn: jax.Array  # bool [N], the target itself, with the same noise again: all True, but for rounding
    same_noise: jax.Array  # bool [N], the draft model's token under the noise that the target had; greedy at 0
    most_likely: jax.Array  # bool [N], the draft model's most likely token
    classic: jax.Array  # float32 [N], probability that min(1, p/q) accepts a token that was drawn for itself


def proposals(target: jax.Array, draft: jax.Array, tokens: jax.Array, sampling: SamplingBatch) -> Proposals:
    """Compare logits [N, vocab] of both models where the target wrote `tokens` [N], sampled by temperature alone.

    A token that is drawn from q and kept with probability min(1, p/q) is kept with probability sum(min(p, q)) on the
    whole (Leviathan et al. 2023).
    """
    words = jnp.arange(target.shape[-1], dtype=jnp.int32)[None]
    temperature = sampling.temperature[:, None]

    def drawn(logits: jax.Array) -> jax.Array:
        return jnp.argmax(perturbed(logits, words, sampling), axis=-1) == tokens

    def distribution(logits: jax.Array) -> jax.Array:
        greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
        return jnp.where(temperature > 0, jax.nn.softmax(logits / jnp.where(temperature > 0, temperature, 1.0)), greedy)

    overlap = jnp.sum(jnp.minimum(distribution(target), distribution(draft)), axis=-1)
    return Proposals(drawn(target), drawn(draft), jnp.argmax(draft, axis=-1) == tokens, overlap)


def chains(accepted: Iterable[np.ndarray], length: int) -> tuple[int, int]:
    """Tokens accepted and tokens drafted, when drafts of `length` follow each other along each text.

    `accepted` is, per text, bool [N]. A round takes the draft up to its first wrong token, then a token of the target
    in any case; the next begins after that. What would be drafted beyond the end of a text is not counted.
    """
    kept = drafted = 0
    for text in accepted:
        at = 0
        while at < len(text):
            draft = text[at : at + length]
            right = len(draft) if draft.all() else int(np.argmin(draft))
            kept, drafted, at = kept + right, drafted + len(draft), at + right + 1
    return kept, drafted


@dataclass(frozen=True)
class Acceptance:
    """Figures of some texts, each a share of 1, but for the number of tokens."""

    tokens: int
    same_noise: float
    most_likely: float
    classic: float
    chained: float

    @classmethod
    def of(cls, texts: Sequence[Proposals]) -> Acceptance:
        kept, drafted = chains((np.asarray(text.same_noise) for text in texts), DRAFTED)
        every = jax.tree.map(lambda *parts: np.concatenate(parts), *texts)
        return cls(
            tokens=len(every.same_noise),
            same_noise=float(np.mean(every.same_noise)),
            most_likely=float(np.mean(every.most_likely)),
            classic=float(np.mean(every.classic)),
            chained=kept / max(drafted, 1),
        )


def measure(target: Path, draft: Path, cases: int) -> dict[float, dict[str, Acceptance]]:
    """Acceptance by temperature (0 and `TEMPERATURE`) and kind of held-out prompt; "all" is all of those without tools.

    The target answers `cases` prompts of the held-out mixture, and further ones with tools if it knows them. The first
    token of an answer comes with the prompt, so it is not drafted.

    Raises:
        RuntimeError: the target's own tokens are not found again, so the noise is not the engine's.
    """
    samples = held_out_conversations(5, cases, knows_tools(load_tokenizer(target).chat_template))
    llm = LLM(target, max_num_seqs=64)
    models = [load_checkpoint(folder, dtype="float32")[1] for folder in (target, draft)]
    found = {}
    for temperature in (0.0, TEMPERATURE):
        texts = _along_answers(llm, models[0], models[1], samples, temperature)
        again = float(np.mean(np.concatenate([text.redrawn for text in texts])))
        if again < SAME_DRAWS:
            raise RuntimeError(f"at temperature {temperature}, {again:.1%} of the target's tokens are found again")
        kinds = sorted({sample.kind for sample in samples})
        plain = [text for text, sample in zip(texts, samples, strict=True) if sample.talk is None]
        found[temperature] = {"all": Acceptance.of(plain)} | {
            kind: Acceptance.of([text for text, sample in zip(texts, samples, strict=True) if sample.kind == kind])
            for kind in kinds
        }
    return found


def _along_answers(
    llm: LLM, target: DecoderLM, draft: DecoderLM, samples: list[Sample], temperature: float
) -> list[Proposals]:
    params = [SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=i) for i in range(len(samples))]
    texts = []
    for seed, output in enumerate(own_answers(llm, samples, params)):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        ids = np.zeros(PADDED_TO * math.ceil((len(prompt) + len(answer)) / PADDED_TO) + 1, np.int32)
        ids[: len(prompt) + len(answer)] = prompt + answer
        whole = jax.device_get(_along(target, draft, ids, temperature, np.array([0, seed], np.uint32)))
        drafted = np.arange(len(prompt), len(prompt) + len(answer) - 1)  # each of these says what follows it
        texts.append(jax.tree.map(partial(np.take, indices=drafted), whole))
    return texts


@jax.jit
def _along(target: DecoderLM, draft: DecoderLM, ids: jax.Array, temperature: jax.Array, key: jax.Array) -> Proposals:
    """The `proposals` for ids[1:], each after all before it. `key` is that of a request with a seed."""
    count = ids.shape[0] - 1
    positions = jnp.arange(count)
    logits = [model.logits(model(ids[:-1], positions, CausalAttend())) for model in (target, draft)]
    off = jnp.zeros(count, jnp.int32)
    sampling = SamplingBatch(
        jnp.full(count, temperature), off, off + 1.0, off + 0.0, jnp.tile(key, (count, 1)), positions + 1
    )
    return proposals(logits[0], logits[1], ids[1:], sampling)
