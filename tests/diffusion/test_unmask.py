"""Which masked tokens a round commits, against the same rules in plain Python."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.diffusion.unmask import Factor, Hierarchy, Threshold, UnmaskRule
from tests.diffusion import oracle

BLOCK, ROWS = 8, 4
RULES: dict[str, tuple[UnmaskRule, oracle.Rule]] = {
    "threshold": (Threshold(0.6), oracle.by_threshold(0.6)),
    "threshold of 1": (Threshold(1.0), oracle.by_threshold(1.0)),
    "threshold of 0": (Threshold(0.0), oracle.by_threshold(0.0)),
    "hierarchy": (Hierarchy(0.7, 0.3), oracle.by_hierarchy(0.7, 0.3)),
    "factor": (Factor(1.0), oracle.by_factor(1.0)),
    "small factor": (Factor(0.2), oracle.by_factor(0.2)),
    "factor of 0": (Factor(0.0), oracle.by_factor(0.0)),
}
JITTED = {name: jax.jit(rule) for name, (rule, _) in RULES.items()}
# Few values, so that there are ties, and values near and at the thresholds.
confidences = st.sampled_from([0.0, 0.1, 0.3, 0.30001, 0.5, 0.6, 0.7, 0.75, 0.9, 1.0])
blocks = st.lists(st.tuples(confidences, st.booleans()), min_size=BLOCK, max_size=BLOCK)


def committed(
    rule: Callable[[jax.Array, jax.Array], jax.Array], confidence: np.ndarray, masked: np.ndarray
) -> list[set[int]]:
    """The places of each row that the rule commits."""
    return [set(np.flatnonzero(row).tolist()) for row in np.asarray(rule(jnp.asarray(confidence), jnp.asarray(masked)))]


def wanted_of(rule: oracle.Rule, confidence: np.ndarray, masked: np.ndarray) -> list[set[int]]:
    """The places that the rule in plain Python commits; none in a row without masks."""
    return [rule(*row) if row[1].any() else set() for row in zip(confidence, masked, strict=True)]


@pytest.mark.parametrize("name", RULES)
@given(st.lists(blocks, min_size=ROWS, max_size=ROWS))
@settings(max_examples=150)
def test_rules_commit_what_they_say(name, rows):
    confidence = np.asarray([[value for value, _ in row] for row in rows], np.float32)
    masked = np.asarray([[mask for _, mask in row] for row in rows])
    assert committed(JITTED[name], confidence, masked) == wanted_of(RULES[name][1], confidence, masked)


@pytest.mark.parametrize("name", RULES)
@given(blocks)
def test_a_round_commits_something_and_nothing_that_is_there(name, block):
    confidence, masked = (np.asarray([[part[i] for part in block]]) for i in (0, 1))
    got = np.asarray(JITTED[name](jnp.asarray(confidence, jnp.float32), jnp.asarray(masked)))
    assert not (got & ~masked).any() and got.any() == masked.any()


def test_of_ties_the_left_one_goes_first():
    confidence, masked = jnp.full((1, BLOCK), 0.4), jnp.ones((1, BLOCK), bool)
    for rule in (Hierarchy(0.9, 0.5), Factor(0.0)):
        assert np.flatnonzero(np.asarray(rule(confidence, masked))[0]).tolist() == [0]


@pytest.mark.parametrize("name", ["hierarchy", "factor", "small factor", "factor of 0"])
def test_ties_that_go_the_other_way_are_found(name):
    """Planted bug: of equal confidences the right one goes first."""
    rule, plain = RULES[name]
    rng = np.random.default_rng(0)
    confidence = rng.choice(np.float32([0.1, 0.4, 0.6]), (200, BLOCK))
    masked = rng.random((200, BLOCK)) < 0.7
    wanted = wanted_of(plain, confidence, masked)
    assert committed(rule, confidence, masked) == wanted

    def planted(confidence: jax.Array, masked: jax.Array) -> jax.Array:
        return rule(confidence[:, ::-1], masked[:, ::-1])[:, ::-1]

    assert committed(planted, confidence, masked) != wanted
