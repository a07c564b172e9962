"""Speculative sampling's rule: accept a draft with min(1, p/q), else draw from the excess of p over q.

It is from Leviathan, Kalman and Matias 2022, "Fast inference from transformers via speculative decoding", and Chen et
al. 2023, "Accelerating large language model decoding with speculative sampling". If draft x is drawn from q, and p is
the target's distribution at its place, the resulting token is distributed as p:

    q(x) min(1, p(x)/q(x))  +  P(rejected) * max(0, p(x) - q(x)) / sum_y max(0, p(y) - q(y))  =  p(x),

because the chance of a rejection is that sum. A draft that was looked up instead of drawn has a one-point q: it is
accepted with p(x), and otherwise the token comes from p without x, renormalised. Greedy decoding has a one-point p: a
draft is accepted if it is the target's own token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.textbook.speculative.random_streams import Streams


@dataclass(frozen=True)
class Verdict:
    """Result of the verification of a round's drafts."""

    num_accepted: int  # accepted drafts, from the first on
    token: int  # the token after them: the bonus token, or the one in place of the rejected draft
    ratios: tuple[float, ...]  # chance of acceptance of each draft up to the first rejected one
    draws: tuple[float | None, ...] = ()  # uniform number that each of these chances was compared with


def acceptance_probability(p: np.ndarray, q: np.ndarray, token: int) -> float:
    """Return min(1, p/q) of a draft.

    Args:
        p, q: [V], the distributions of target and drafter.
        token: the draft. If its q is 0, so that it cannot have been drawn, it is accepted if its p is not 0.
    """
    if p[token] >= q[token]:
        return 1.0 if p[token] > 0 else 0.0
    return float(p[token] / q[token])


def max_fn(x: np.ndarray) -> np.ndarray:
    """Return max(0, x) [..., V] divided by its sum over the last axis: the sample adjustment, for x = p - q.

    Raises:
        ValueError: nothing of a row is positive, so there is no such distribution.
    """
    more = np.maximum(x, 0.0)
    total = more.sum(axis=-1, keepdims=True)
    if not (total > 0).all():
        raise ValueError("x must have a positive entry in each row")
    return more / total


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return `max_fn` of p - q [V]; p itself where they are equal, which cannot happen after a rejection."""
    return max_fn(p - q) if (p > q).any() else p


def verify(
    p: np.ndarray, q: np.ndarray, drafts: Sequence[int], streams: Streams, *, skip_sample_adjustment: bool = False
) -> Verdict:
    """Accept the drafts in their order up to the first rejection, and add one token.

    Args:
        p: [g + 1, V], the target's distributions at the place of every draft and after the last.
        q: [g, V], the distributions of the drafts; one-point for drafts that were looked up.
        drafts: g token ids; g may be 0.
        streams: acceptance and the added token have streams of their own, so that neither depends on the draws of
            drafts.
        skip_sample_adjustment: replace a rejected draft by a token of p itself. That is biased: the tokens that the
            drafter prefers come out too often. It is there for comparison.
    """
    ratios: list[float] = []
    draws: list[float | None] = []
    for index, draft in enumerate(drafts):
        ratios.append(acceptance_probability(p[index], q[index], draft))
        accepted = streams.acceptance.accepts(ratios[-1])
        draws.append(streams.acceptance.latest)
        if not accepted:
            instead = p[index] if skip_sample_adjustment else residual(p[index], q[index])
            return Verdict(index, streams.final.token(instead), tuple(ratios), tuple(draws))
    return Verdict(len(drafts), streams.final.token(p[len(drafts)]), tuple(ratios), tuple(draws))
