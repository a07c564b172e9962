"""Draft trees as arrays: the choice of their nodes from a pool, what each node may see, and the accepted path.

A pool holds the nodes that a drafter with a beam of K has scored: K children of the root, and in each of D further
levels K children of each of the K best nodes of the level before (Li et al. 2024, EAGLE-2). A tree keeps the best nodes
of a pool in the pool's order, in which parents precede their children.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.speculative.tails import one_bit

ROOT = -1


def pool_size(depth: int, top_k: int) -> int:
    """Return the number of nodes of a pool with `depth` levels after the first."""
    return top_k + depth * top_k**2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """N nodes of each of R sequences, parents before children; the root, a sequence's latest token, is not counted."""

    tokens: jax.Array  # int32 [R, N]
    parent: jax.Array  # int32 [R, N], ROOT or a node
    depth: jax.Array  # int32 [R, N], children of the root have 1
    score: jax.Array  # float32 [R, N], log-probability of the path; -inf: there is no such node
    count: jax.Array  # int32 [R], depth of the deepest node
    entropy: jax.Array  # float32 [R], nats, see `Drafts`

    @property
    def there(self) -> jax.Array:
        """bool [R, N]: whether there is such a node."""
        return self.score > -jnp.inf


def no_tree(rows: int, num_nodes: int) -> Tree:
    """Return trees without nodes."""
    zeros, row_zeros = jnp.zeros((rows, num_nodes), jnp.int32), jnp.zeros(rows, jnp.int32)
    return Tree(zeros, zeros, zeros, jnp.full((rows, num_nodes), -jnp.inf), row_zeros, row_zeros.astype(jnp.float32))


def best_of_pool(
    tokens: jax.Array,
    scores: jax.Array,
    frontiers: jax.Array,
    *,
    num_nodes: int,
    wanted: jax.Array,
    entropy: jax.Array,
) -> Tree:
    """Return the tree of the `num_nodes` nodes with the greatest scores, ties to the lower index.

    A child's score is at most its parent's, and its index greater. So the ancestors of a chosen node are chosen too.

    Args:
        tokens, scores: [R, M] of a pool; -inf: not drafted.
        frontiers: int32 [R, D, K], pool indices of the nodes whose children make up each level after the first.
        wanted: int32 [R], the greatest depth.
    """
    top_k = frontiers.shape[2]
    _, chosen = lax.top_k(scores, num_nodes)
    chosen = jnp.sort(chosen, axis=1)
    level, place = (chosen - top_k) // top_k**2, (chosen - top_k) % top_k**2
    from_frontier = jnp.maximum(level, 0) * top_k + jnp.maximum(place, 0) // top_k
    parent = jnp.take_along_axis(frontiers.reshape(frontiers.shape[0], -1), from_frontier, axis=1)
    parent = jnp.where(chosen < top_k, ROOT, parent)
    score = jnp.take_along_axis(scores, chosen, axis=1)
    depth = jnp.where(chosen < top_k, 1, level + 2)
    score = jnp.where(depth <= wanted[:, None], score, -jnp.inf)
    return Tree(
        tokens=jnp.take_along_axis(tokens, chosen, axis=1),
        parent=jnp.where(parent == ROOT, ROOT, jnp.sum(chosen[:, None] < parent[:, :, None], axis=2)),
        depth=depth,
        score=score,
        count=jnp.max(jnp.where(score > -jnp.inf, depth, 0), axis=1),
        entropy=entropy,
    )


def ancestor_bits(tree: Tree, first: jax.Array, *, max_depth: int, words: int) -> jax.Array:
    """Return uint32 [R, N, words], the bits of each node and its ancestors; node 0 has bit `first` [R]."""
    own = one_bit(first[:, None] + jnp.arange(tree.tokens.shape[1]), words)
    bits = own
    for _ in range(max_depth - 1):
        above = jnp.take_along_axis(bits, jnp.maximum(tree.parent, 0)[..., None], axis=1)
        bits = own | jnp.where((tree.parent == ROOT)[..., None], jnp.uint32(0), above)
    return bits


def paths(tree: Tree, *, max_depth: int) -> jax.Array:
    """Return int32 [R, N, max_depth], the tokens of each node and its ancestors, upwards; -1 after the last."""
    node = jnp.broadcast_to(jnp.arange(tree.tokens.shape[1]), tree.tokens.shape)
    found = []
    for _ in range(max_depth):
        of_node = jnp.maximum(node, 0)
        found.append(jnp.where(node == ROOT, -1, jnp.take_along_axis(tree.tokens, of_node, axis=1)))
        node = jnp.where(node == ROOT, ROOT, jnp.take_along_axis(tree.parent, of_node, axis=1))
    return jnp.stack(found, axis=2)


def accepted_path(tree: Tree, sampled: jax.Array, *, max_depth: int) -> tuple[jax.Array, jax.Array]:
    """Return the path to the deepest accepted node: each node on it is the token sampled after its parent.

    Args:
        sampled: int32 [R, 1 + N], after the root and after each node.

    Returns:
        int32 [R, max_depth]: nodes in the order of their depth, -1 after the last; and int32 [R]: their number.
    """
    above = tree.parent + 1  # index of the parent in `sampled`
    agrees = tree.there & (tree.tokens == jnp.take_along_axis(sampled, above, axis=1))
    accepted = agrees & (tree.parent == ROOT)
    for _ in range(max_depth - 1):
        of_parent = jnp.take_along_axis(accepted, jnp.maximum(tree.parent, 0), axis=1)
        accepted = agrees & ((tree.parent == ROOT) | of_parent)
    depths = jnp.arange(1, max_depth + 1)
    at_depth = accepted[:, None] & (tree.depth[:, None] == depths[:, None])  # one node at most: siblings differ
    found = jnp.any(at_depth, axis=2)
    return jnp.where(found, jnp.argmax(at_depth, axis=2), -1).astype(jnp.int32), jnp.sum(found, axis=1)
