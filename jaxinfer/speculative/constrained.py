"""Drafts of constrained sequences: the automaton's states along them, and none behind what is not allowed.

Only the target's tokens are held to the automaton. A draft that it does not allow would never be accepted, nor would
what stands behind it: that there is no such draft changes nothing.
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
    """What is allowed of the drafts behind states int32 [R], and the states int32 [R, W] before each draft and behind
    the last."""
    states = [state]
    for place in range(drafts.tokens.shape[1]):
        states.append(advance(constraint, states[-1], drafts.tokens[:, place], most_bytes=MOST_BYTES))
    along = jnp.stack(states, axis=1)
    living = jnp.sum(along[:, 1:] != DEAD, axis=1)  # who is dead stays so
    return replace(drafts, count=jnp.minimum(drafts.count, living)), along


def along_tree(constraint: Constraint, state: jax.Array, tree: Tree, *, max_depth: int) -> tuple[Tree, jax.Array]:
    """What is allowed of the trees behind states int32 [R], and the states int32 [R, 1 + N] behind root and nodes."""
    is_first = tree.parent == ROOT
    of_nodes = jnp.full(tree.tokens.shape, DEAD, jnp.int32)
    for _ in range(max_depth):
        above = jnp.take_along_axis(of_nodes, jnp.maximum(tree.parent, 0), axis=1)
        before = jnp.where(is_first, state[:, None], above)
        of_nodes = advance(constraint, before, tree.tokens, most_bytes=MOST_BYTES)
    pruned = replace(tree, score=jnp.where(of_nodes == DEAD, -jnp.inf, tree.score))
    return pruned, jnp.concatenate([state[:, None], of_nodes], axis=1)


def after_landing(constraint: Constraint, state: jax.Array, along: jax.Array, landed: jax.Array) -> jax.Array:
    """int32 [R]: the states after what landed.

    Args:
        state: int32 [R], before.
        along: int32 [R, W], before each of the tokens that could land.
        landed: int32 [R, W], -1 behind the last.
    """
    count = jnp.sum(landed >= 0, axis=1)
    last = jnp.maximum(count - 1, 0)[:, None]
    before, token = jnp.take_along_axis(along, last, axis=1)[:, 0], jnp.take_along_axis(landed, last, axis=1)[:, 0]
    return jnp.where(count > 0, advance(constraint, before, token), state)
