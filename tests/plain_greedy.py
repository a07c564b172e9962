"""Greedy decoding as plainly as it can be said: the whole sequence anew for every token, no cache, no engine."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.models.decoder import DecoderLM


class PlainGreedy:
    """Several prompts side by side, padded to one length so that one compiled program serves every step.

    Args:
        model: any decoder.
        prompts: token ids, of any lengths.
        steps: how many tokens to add to each.
    """

    def __init__(self, model: DecoderLM, prompts: Sequence[Sequence[int]], steps: int) -> None:
        longest = max(map(len, prompts)) + steps
        self.steps = steps
        self.rows, self.ends = np.arange(len(prompts)), np.array([len(prompt) for prompt in prompts])
        self.ids = np.zeros((len(prompts), longest), np.int32)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = prompt
        positions = np.broadcast_to(np.arange(longest), self.ids.shape)
        # The dynamic rotary type sees the prompt's length for its tokens, later the length so far; longrope always the
        # length so far, for all tokens.
        self._turns, self._lengths = model.config.rope.turning_length is not None, self.ends[:, None]
        self._forward = jax.jit(
            lambda ids, lengths: model.logits(
                model(ids, positions, CausalAttend(), jnp.maximum(lengths, 0 if self._turns else positions + 1))
            )
        )

    def logits(self) -> np.ndarray:
        """float32 [prompts, T, V] of the tokens so far; those of padding mean nothing."""
        lengths = self.ends[:, None] if self._turns else self._lengths
        return np.asarray(self._forward(jnp.asarray(self.ids), jnp.broadcast_to(lengths, self.ids.shape)))

    def run(self) -> tuple[list[list[int]], float]:
        """The continuations, and the smallest distance between the best and the second-best logit on the way."""
        margin = float("inf")
        for _ in range(self.steps):
            last = self.logits()[self.rows, self.ends - 1]
            second, first = np.sort(last, axis=-1)[:, -2:].T
            margin = min(margin, float((first - second).min()))
            self.ids[self.rows, self.ends] = last.argmax(axis=-1)
            self.ends = self.ends + 1
        return [self.ids[row, end - self.steps : end].tolist() for row, end in enumerate(self.ends)], margin
