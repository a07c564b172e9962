"""Drafts of constrained sequences: the automaton's states along them, and their cut at the first forbidden token.

The automaton constrains only the target's tokens. A draft that it forbids would never be accepted, nor would the
drafts after it, so cutting them off changes no token.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.sampling.constraint import DEAD, Constraint, advance
from jaxinfer.speculative.proposer import Drafts
from jaxinfer.speculative.tree import ROOT, Tree

# Longer tokens are not drafted: the states of a tree take a lookup for each byte and level, one after the other.
MOST_BYTES = 16


def along_chain(constraint: Constraint, state: jax.Array, drafts: Drafts) -> tuple[Drafts, jax.Array]:
    """Cut drafts after states int32 [R] to their allowed part; returns them, and the states int32 [R, W] before each
    draft and after the last."""
    states = [state]
    for place in range(drafts.tokens.shape[1]):
        states.append(advance(constraint, states[-1], drafts.tokens[:, place], most_bytes=MOST_BYTES))
    along = jnp.stack(states, axis=1)
    living = jnp.sum(along[:, 1:] != DEAD, axis=1)  # a dead state stays dead
    return replace(drafts, count=jnp.minimum(drafts.count, living)), along


def along_tree(constraint: Constraint, state: jax.Array, tree: Tree, *, max_depth: int) -> tuple[Tree, jax.Array]:
    """Prune trees after states int32 [R] to their allowed nodes; returns them, and the states int32 [R, 1 + N] after
    root and nodes."""
    is_first = tree.parent == ROOT
    node_states = jnp.full(tree.tokens.shape, DEAD, jnp.int32)
    for _ in range(max_depth):
        above = jnp.take_along_axis(node_states, jnp.maximum(tree.parent, 0), axis=1)
        before = jnp.where(is_first, state[:, None], above)
        node_states = advance(constraint, before, tree.tokens, most_bytes=MOST_BYTES)
    pruned = replace(tree, score=jnp.where(node_states == DEAD, -jnp.inf, tree.score))
    return pruned, jnp.concatenate([state[:, None], node_states], axis=1)


def after_landing(constraint: Constraint, state: jax.Array, along: jax.Array, landed: jax.Array) -> jax.Array:
    """Return int32 [R], the states after the tokens that landed.

    Args:
        state: int32 [R], states before the round.
        along: int32 [R, W], states before each of the tokens that could land.
        landed: int32 [R, W], -1 after the last.
    """
    count = jnp.sum(landed >= 0, axis=1)
    last = jnp.maximum(count - 1, 0)[:, None]
    before, token = jnp.take_along_axis(along, last, axis=1)[:, 0], jnp.take_along_axis(landed, last, axis=1)[:, 0]
    return jnp.where(count > 0, advance(constraint, before, token), state)
