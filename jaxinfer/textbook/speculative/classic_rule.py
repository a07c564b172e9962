"""Speculative sampling's rule: accept a draft with min(1, p/q), else draw from what p has more than q.

From Leviathan, Kalman and Matias 2022, "Fast inference from transformers via speculative decoding", and Chen et al.
2023, "Accelerating large language model decoding with speculative sampling". If draft x is drawn from q, and p is the
target's distribution in its place, the token that comes out is distributed as p:

    q(x) min(1, p(x)/q(x))  +  P(rejected) * max(0, p(x) - q(x)) / sum_y max(0, p(y) - q(y))  =  p(x),

because the chance of a rejection is that sum. A draft that was not drawn but looked up is a q of one point: it is
accepted with p(x), and otherwise the token comes from p without x, renormalised. Greedy decoding is a p of one point:
a draft is accepted where it is the target's own token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.textbook.speculative.random_streams import Streams


@dataclass(frozen=True)
class Verdict:
    """What the target makes of a round's drafts."""

    num_accepted: int  # drafts, from the first on
    token: int  # what comes after them: the bonus token, or the one in place of the rejected draft
    ratios: tuple[float, ...]  # the chance of acceptance of each draft that was looked at


def acceptance_probability(p: np.ndarray, q: np.ndarray, token: int) -> float:
    """min(1, p/q) of a draft.

    Args:
        p, q: [V], the distributions of target and drafter.
        token: the draft. With q = 0, which cannot have been drawn, it is accepted where the target allows it at all.
    """
    if p[token] >= q[token]:
        return 1.0 if p[token] > 0 else 0.0
    return float(p[token] / q[token])


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[V]: max(0, p - q) divided by its sum; p itself where nothing is left, which no rejection can meet."""
    more = np.maximum(p - q, 0.0)
    total = more.sum()
    return more / total if total > 0 else p


def verify(
    p: np.ndarray, q: np.ndarray, drafts: Sequence[int], streams: Streams, *, skip_sample_adjustment: bool = False
) -> Verdict:
    """Accept the drafts in their order up to the first rejection, and add one token.

    Args:
        p: [g + 1, V], the target's distributions in the place of every draft and behind the last.
        q: [g, V], what the drafts were drawn from; one point for drafts that were looked up.
        drafts: g token ids, of which there may be none.
        streams: acceptance and added token take from their own, so that neither depends on what drew the drafts.
        skip_sample_adjustment: replace a rejected draft by a token of p itself. That is biased: the tokens that the
            drafter prefers come out too often. It is there to be looked at.
    """
    ratios = []
    for index, draft in enumerate(drafts):
        ratios.append(acceptance_probability(p[index], q[index], draft))
        if not streams.acceptance.accepts(ratios[-1]):
            instead = p[index] if skip_sample_adjustment else residual(p[index], q[index])
            return Verdict(index, streams.final.token(instead), tuple(ratios))
    return Verdict(len(drafts), streams.final.token(p[len(drafts)]), tuple(ratios))
