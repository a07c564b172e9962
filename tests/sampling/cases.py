"""Logits and parameters that reach every path of a sampler: few and many candidates, one and several blocks."""

from __future__ import annotations

import numpy as np

from tests.sampling.reference import Filters


def peaked(vocab: int) -> np.ndarray:
    """A few tokens hold most of the mass."""
    return np.random.default_rng(vocab).normal(0, 2.5, vocab).astype(np.float32)


def flat(vocab: int) -> np.ndarray:
    """No small set of tokens holds much: what top-p keeps is most of the vocabulary."""
    return np.random.default_rng(vocab + 1).normal(0, 0.3, vocab).astype(np.float32)


def head_and_tail(vocab: int) -> np.ndarray:
    """Half of the mass in 40 tokens, the rest spread thin: top-k cuts off mass that top-p must not count."""
    rng = np.random.default_rng(vocab + 2)
    mass = np.where(rng.permutation(vocab) < 40, 0.5 / 40, 0.5 / vocab)
    return np.log(mass * rng.uniform(0.8, 1.25, vocab)).astype(np.float32)


def tied(vocab: int) -> np.ndarray:
    """Many tokens share each of a few values."""
    return np.random.default_rng(vocab + 3).integers(0, 4, vocab).astype(np.float32) * np.float32(0.7)


LOGITS = {function.__name__: function for function in (peaked, flat, head_and_tail, tied)}

SMALL = {
    "everything": Filters(),
    "cold": Filters(temperature=0.5),
    "hot": Filters(temperature=2.0),
    "top_k": Filters(top_k=3),
    "top_k_one": Filters(top_k=1),
    "top_k_of_the_vocabulary_or_more": Filters(top_k=5000),
    "top_p": Filters(top_p=0.7),
    "small_top_p": Filters(top_p=0.001),
    "min_p": Filters(min_p=0.15),
    "min_p_one": Filters(min_p=1.0),
    "cold_top_p": Filters(temperature=0.6, top_p=0.8),
    "hot_top_p": Filters(temperature=1.7, top_p=0.6),
    "hot_min_p": Filters(temperature=1.8, min_p=0.2),
    "top_k_top_p": Filters(top_k=4, top_p=0.62),
    "top_k_min_p": Filters(top_k=5, min_p=0.2),
    "top_p_min_p": Filters(top_p=0.85, min_p=0.12),
    "top_p_of_what_min_p_left": Filters(temperature=1.5, top_p=0.61, min_p=0.3),
    "all": Filters(temperature=1.3, top_k=5, top_p=0.83, min_p=0.1),
}
# Vocabularies beyond the 64 candidates: kept sets below, at and beyond the candidates.
LARGE = {
    "everything": Filters(),
    "hot": Filters(temperature=1.5),
    "top_k_below_the_candidates": Filters(top_k=40),
    "top_k_of_all_candidates": Filters(top_k=64),
    "top_k_of_one_more_than_the_candidates": Filters(top_k=65),
    "top_k_beyond_the_candidates": Filters(top_k=150),
    "top_p_that_few_tokens_fill": Filters(temperature=0.7, top_p=0.3),
    "top_p_that_many_tokens_fill": Filters(top_p=0.9),
    "min_p": Filters(min_p=0.3),
    "top_p_of_the_many_that_min_p_left": Filters(top_p=0.7, min_p=0.5),
    "few_of_many": Filters(top_k=150, top_p=0.55),
    "many_of_many": Filters(top_k=300, top_p=0.93),
    "few_of_few": Filters(top_k=50, top_p=0.55),
    "top_k_beyond_min_p": Filters(top_k=150, min_p=0.4),
    "all": Filters(temperature=1.2, top_k=150, top_p=0.803, min_p=0.25),
}
