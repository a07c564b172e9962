"""The truth of constrained block diffusion: a plain loop from left to right over whole sequences, with whole masks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.scheduling.request import Request
from tests.diffusion.oracle import Rule, block_logits, draw
from tests.sampling.reference import Filters


@dataclass
class Constrained:
    """What comes after a prompt, and how it was found."""

    tokens: list[int] = field(default_factory=list)
    reason: str = "length"
    num_rounds: int = 0
    forced_at: list[int] = field(default_factory=list)  # numbers of tokens
    redrawn_at: list[int] = field(default_factory=list)
    num_more: int = 0  # draws that were committed after those of the leftmost places


class Credits:
    """Credits of one block, see `tests.diffusion.oracle.generate`."""

    def __init__(self, size: int, vocab: int, credit: tuple[float, float, float] | None) -> None:
        self.credit, self.credits = credit, np.zeros((size, vocab))

    def added(self, logits: np.ndarray, masked: np.ndarray) -> np.ndarray:
        if self.credit is None:
            return logits
        alpha, gamma, beta = self.credit
        self.credits *= beta
        for place in np.flatnonzero(masked):
            top = logits[place].argmax()
            self.credits[place, top] += (
                1 / np.exp(logits[place].astype(np.float64) - logits[place, top]).sum()
            ) ** gamma
        return (logits + alpha * np.log1p(self.credits)).astype(np.float32)


def constrained(
    model: DecoderLM, request: Request, rule: Rule, credit: tuple[float, float, float] | None = None
) -> Constrained:
    """What a constrained request gets.

    Args:
        credit: alpha, gamma and beta of credits for tokens that were likeliest in rounds before.
    """
    size, mask, vocab = model.config.block_size, model.config.mask_token_id, model.config.vocab_size
    params, guard = request.sampling_params, request.guard
    assert size is not None and mask is not None and guard is not None
    filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
    known, state, out = list(request.prompt_token_ids), guard.start, Constrained()

    def commit(token: int) -> bool:
        """Commit a token; returns whether the sequence ends with it."""
        nonlocal state
        following = guard.advance(state, token)
        assert following is not None
        state = following
        known.append(token)
        out.tokens.append(token)
        if guard.is_end(token) or token in request.ending_token_ids:
            out.reason = "stop"
            return True
        return len(known) == request.max_total_tokens

    def commit_forced() -> bool:
        """Commit a token that is not drawn, if there is one; returns whether there was."""
        end = guard.ends(state)
        token = guard.forced(state) if end is None else end
        if token is None:
            return False
        out.forced_at.append(len(out.tokens))
        ended.append(commit(token))
        return True

    ended: list[bool] = [False]
    drew = False
    while not ended[-1]:
        start, before = len(known) // size * size, out.num_rounds
        credits, number = Credits(size, vocab, credit), 0
        while len(known) < start + size and not ended[-1]:
            if commit_forced():
                continue
            ids = np.full(start + size, mask)
            ids[: len(known)] = known
            masked = ids[start:] == mask
            logits = block_logits(model, ids.tolist(), start).copy()
            logits[:, mask] = -np.inf
            logits = credits.added(logits, masked)
            drawn, confidence = draw(logits, start, number, filters, request.request_key)
            commits = rule(confidence, masked)
            place = len(known) - start
            token = int(drawn[place])
            allowed = guard.mask(state, vocab)
            assert allowed is not None
            bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:vocab].astype(bool)
            if not bits[token]:
                out.redrawn_at.append(len(out.tokens))
                within = np.where(bits, logits, -np.inf)
                token = int(draw(within, start, number, filters, request.request_key)[0][place])
            number += 1
            out.num_rounds += 1
            ended.append(commit(token))
            while len(known) < start + size and not ended[-1]:
                place = len(known) - start
                if commit_forced():
                    continue
                if place not in commits or guard.advance(state, int(drawn[place])) is None:
                    break
                out.num_more += 1
                ended.append(commit(int(drawn[place])))
        # One more round computes the final keys and values of a block, which nothing reads if its last draw is the last
        # of all.
        drew, drew_before = out.num_rounds > before, drew
        out.num_rounds += int(not ended[-1]) - int(ended[-1] and not drew and drew_before)
    return out
