"""`DrafterBIM`: draft trees of all branches at once, in one sequence, after SpecSoT's design."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.branching.bim import EMPTY, TRUNK
from jaxinfer.field_checks import check_positive_integer
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.speculative.tree import ROOT, best_of_pool, pool_size
from jaxinfer.textbook.branching.cached_forward import CachedForward
from jaxinfer.textbook.branching.eagle3_forward import Eagle3Forward
from jaxinfer.textbook.branching.kv_cache import ModelKVCache
from jaxinfer.textbook.branching.masks import additive_mask, seen_by_newest
from jaxinfer.textbook.branching.state_manager import BranchStateManager
from jaxinfer.textbook.devices import Array, placed


@dataclass(frozen=True, eq=False)
class DraftTrees:
    """Draft trees of B branches, N nodes each, parents before children; a branch's tip is the root and no node.

    It unpacks into what SpecSoT's `generate_draft_tree` returns: draft_tokens, tree_structure, tree_mask.
    """

    branch_ids: tuple[int, ...]  # of the trees
    draft_tokens: Array  # int32 [B, N]
    tree_structure: Array  # int32 [B, N], the parent of each node; -1: the tip
    tree_mask: Array  # bool [B, N, N], whether a node sees another one: its ancestors and itself
    scores: Array  # float32 [B, N], log-probability of the path from the tip
    position_ids: Array  # int32 [B, N], depth in the branch

    def __iter__(self) -> Iterator[Array]:
        yield from (self.draft_tokens, self.tree_structure, self.tree_mask)

    @property
    def draft_bim(self) -> np.ndarray:
        """int32 [B * N]: the branch of each node, for a verification of all trees as one sequence."""
        return np.repeat(np.asarray(self.branch_ids, np.int32), self.draft_tokens.shape[1])


class DrafterBIM:
    """Drafter that has one sequence in either mode: expand_root for all tips, then levels of all trees, in one row.

    The trees are EAGLE-2's (Li et al. 2024): a level has the `top_k` best children of the level before by the
    probability of their paths, and a tree keeps the best nodes of all levels. Differences from the source, which
    sketches this: expand_root also computes what branches have accepted since the round before, whose KV would be
    missing else, with their tips last; the mask of a level holds the KV of the levels above, which is in the temporary
    part of the cache; and the draft model is an EAGLE-3 head or any decoder.

    The engine drafts trees with EAGLE-3 heads in ragged rows of pages (`jaxinfer.speculative.tree`).

    Attributes:
        forward: the draft model; `forward.shapes` are the rows and columns of every call.
        draft_kv_cache: its KV: the prefix and the branches' tokens, at their indices in the one sequence.
    """

    def __init__(
        self,
        draft_model: DecoderLM | CachedForward | Eagle3Forward,
        draft_kv_cache: ModelKVCache | None = None,
        top_k: int = 10,
        tree_depth: int = 5,
        total_tokens: int | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        """Take a draft model and its cache.

        Args:
            draft_model: a causal decoder with the target's vocabulary, or an EAGLE-3 head as an `Eagle3Forward`.
            draft_kv_cache: one row, empty or with the KV of the prefix; None: an empty one of `capacity` slots.
            top_k: children of a node, and nodes of a level that get children.
            tree_depth: levels of a tree. Each but the first is one forward, of `top_k` tokens for each branch.
            total_tokens: nodes of a tree; None: all that were scored.
            capacity: of a new cache: the prefix, all tokens of all branches, and the temporary tokens of a round.

        Raises:
            ValueError: a number is out of range, or there is not either a cache of one row or a capacity.
        """
        self.forward = CachedForward(draft_model) if isinstance(draft_model, DecoderLM) else draft_model
        check_positive_integer("top_k", top_k)
        check_positive_integer("tree_depth", tree_depth)
        # The target's ids of what is drafted.
        if isinstance(self.forward, Eagle3Forward):
            self._words = self.forward.target_ids
        else:
            self._words = np.arange(self.forward.config.vocab_size, dtype=np.int32)
        vocab, pool = len(self._words), pool_size(tree_depth - 1, top_k)
        if top_k > vocab:
            raise ValueError(f"top_k: {top_k}, allowed are 1 to {vocab}")
        if total_tokens is not None and not 1 <= total_tokens <= pool:
            raise ValueError(f"total_tokens: {total_tokens}, allowed are None and 1 to {pool}")
        if (draft_kv_cache is None) == (capacity is None):
            raise ValueError(f"capacity: {capacity}, allowed is a number where no draft_kv_cache is given, else None")
        if draft_kv_cache is None:
            assert capacity is not None
            draft_kv_cache = ModelKVCache.allocate(self.forward.config, capacity, dtype=self.forward.dtype)
        if draft_kv_cache.batch_size != 1:
            raise ValueError(f"draft_kv_cache: {draft_kv_cache.batch_size} rows, allowed is one")
        self.draft_kv_cache = draft_kv_cache
        self.top_k, self.tree_depth, self.total_tokens = top_k, tree_depth, total_tokens or pool
        self._held: list[int] | None = None  # tokens at the cache's indices, after the first round

    def prefill(self, token_ids: Sequence[int] | Array, hidden_states: Array | None = None) -> None:
        """Compute the prefix, whose tokens a state manager does not know, into the empty cache.

        Args:
            token_ids: int [P].
            hidden_states: for a head the target's features [1, P, num_features], else None.

        Raises:
            ValueError: the cache is not empty, or has no room; or `hidden_states` are not what the model reads.
        """
        ids, cache = np.asarray(token_ids, np.int32).reshape(1, -1), self.draft_kv_cache
        if cache.current_length:
            raise ValueError(f"draft_kv_cache: it holds {cache.current_length} tokens, allowed are none")
        length = ids.shape[1]
        features = self._features(hidden_states, length)
        # A head has no input for the first token, before which there is no feature.
        first = 0 if features is None else 1
        slots = np.arange(first, length)
        if len(slots):
            seen = (slots[:, None] >= np.arange(length)) & (np.arange(length) >= first)
            of_before = None if features is None else features[slots - 1]
            self._compute(ids[:, slots], slots[None], slots, seen[None], of_before, of_target=True)
        cache.written(cache.data, length)

    def generate_draft_tree(self, hidden_states: Array | None, state_manager: BranchStateManager) -> DraftTrees:
        """Draft a tree after the tip of every active branch.

        The cache then holds the sequence up to the tips; what levels have written after them is truncated.

        Args:
            hidden_states: for a head the target's features of all branches, [1, S, num_features], in the order of
                `state_manager.one_sequence`; those of tips, which the target may not have computed yet, are not read.
                None for a decoder, which reads none.
            state_manager: of either mode, the same in every call.

        Raises:
            ValueError: `hidden_states` are not what the model reads, there is no active branch, or the cache lacks the
                prefix, has no room or holds other tokens than the manager's.
        """
        branches, sequence = tuple(state_manager.active_branches), state_manager.one_sequence
        length, rows, k = len(sequence), len(branches), self.top_k
        features = self._features(hidden_states, length)
        self._check(state_manager, length + (self.tree_depth - 1) * rows * k)
        tips = np.array([sequence.indices_of(branch)[-1] for branch in branches])
        bases = sequence.position_ids[tips]
        logits, hidden = self._expand_root(state_manager, tips, features)
        found, best = _top_k(_log_softmax(logits), k)  # [B, k]
        pool_tokens, pool_scores = [found], [best]  # [B, k]; then [B, k * k] for each further level
        tokens, paths = found, best  # of the level that gets children, the frontier
        frontier = np.broadcast_to(np.arange(k), (rows, k))  # its indices in the pool
        frontiers, above = [], np.zeros((rows, k, 0), bool)  # above: what it sees of the temporary tokens
        hidden = None if hidden is None else np.repeat(hidden, k, axis=0)  # of the parents, [B * k, hidden]
        for depth in range(self.tree_depth - 1):
            above = _with_own(above)
            frontiers.append(frontier)
            logits, hidden = self._grow(state_manager, branches, tokens, bases + depth + 1, above, hidden)
            found, best = _top_k(_log_softmax(logits.reshape(rows, k, -1)), k)
            best = (paths[:, :, None] + best).reshape(rows, -1)
            found = found.reshape(rows, -1)
            pool_tokens.append(found)
            pool_scores.append(best)
            chosen, paths = _top_k(best, k)
            tokens = np.take_along_axis(found, chosen, axis=1)
            frontier = k + depth * k * k + chosen
            above = np.take_along_axis(above, chosen[:, :, None] // k, axis=1)
            if hidden is not None:
                hidden = hidden[(np.arange(rows)[:, None] * k + chosen // k).reshape(-1)]
        if self.tree_depth > 1:
            self.draft_kv_cache.truncate(length)
        frontiers = frontiers or [frontier]  # a tree of one level has no parents to look up
        return self._trees(
            state_manager, self._words[np.concatenate(pool_tokens, axis=1)], np.concatenate(pool_scores, axis=1),
            np.stack(frontiers, axis=1), bases,
        )  # fmt: skip

    def _expand_root(
        self, manager: BranchStateManager, tips: np.ndarray, features: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Compute all that the cache lacks, in one row; returns logits float32 [B, V] and outputs of the tips."""
        sequence = manager.one_sequence
        bim, ids, positions = sequence.bim, sequence.token_ids, sequence.position_ids
        held = manager.prefix_len if self._held is None else len(self._held)
        lacking = held + np.flatnonzero(bim[held:] >= 0)  # without the holes of removed branches
        queries = np.union1d(lacking, tips)
        mask = self._build_expand_root_mask(query_bim=bim[queries], history_bim=self._history(manager))
        of_before = None if features is None else features[sequence.before(queries)]
        logits, hidden = self._compute(
            ids[queries][None], positions[queries][None], queries, mask[:, 0] == 0, of_before, of_target=True
        )
        self._held, found = ids.tolist(), np.searchsorted(queries, tips)
        return logits[found], None if hidden is None else hidden[found]

    def _grow(
        self,
        manager: BranchStateManager,
        branches: Sequence[int],
        tokens: np.ndarray,
        positions: np.ndarray,
        above: np.ndarray,
        features: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Compute a level of all trees, [B, k] tokens, in one row; returns logits float32 [B * k, V] and outputs.

        Args:
            positions: int32 [B], of each tree's level.
            features: of a head, [B * k, hidden], the outputs of the parents.
            above: bool [B, k, T], which of its tree's temporary tokens each token sees, T = k for every level so far.
        """
        rows, k, temporary = above.shape
        history = self._history(manager)
        # Levels follow each other in the cache, and within a level the branches.
        structure = np.zeros((rows, k, temporary // k, rows, k), bool)
        for row in range(rows):
            structure[row, :, :, row] = above[row].reshape(k, -1, k)
        mask = self._build_grow_tree_mask(
            query_bim=np.repeat(branches, k), history_bim=history, tree_structure=structure.reshape(rows * k, -1)
        )
        end = len(history) + rows * temporary
        return self._compute(
            self._words[tokens].reshape(1, -1), np.repeat(positions, k)[None], np.arange(end - rows * k, end),
            mask[:, 0] == 0, features, of_target=False,
        )  # fmt: skip

    def _compute(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        seen: np.ndarray,
        features: np.ndarray | None,
        *,
        of_target: bool,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Run the draft model over one row of L tokens; returns logits [L, V] and, of a head, outputs [L, hidden]."""
        cache = self.draft_kv_cache
        if isinstance(self.forward, Eagle3Forward):
            assert features is not None
            return self.forward(cache, ids, positions, slots, seen, features, of_target=of_target)
        return self.forward(cache, ids, positions, slots, seen)[0], None

    def _history(self, manager: BranchStateManager) -> np.ndarray:
        """Return the map of what the draft model has KV of: a head has none of the first token."""
        bim = manager.one_sequence.bim
        if isinstance(self.forward, Eagle3Forward):
            bim[0] = EMPTY
        return bim

    def _features(self, hidden_states: Array | None, length: int) -> np.ndarray | None:
        """Return features [length, num_features] for a head, None for a decoder, or raise ValueError."""
        shape = None if hidden_states is None else np.shape(hidden_states)
        wanted = (1, length, self.forward.num_features) if isinstance(self.forward, Eagle3Forward) else None
        if shape != wanted:
            kind = "None, because the draft model is a decoder" if wanted is None else f"the shape {wanted}"
            raise ValueError(f"hidden_states: {'None' if shape is None else f'shape {shape}'}, allowed is {kind}")
        return None if hidden_states is None else np.asarray(hidden_states)[0]

    def _build_expand_root_mask(
        self, query_bim: Sequence[int] | Array, history_bim: Sequence[int] | Array
    ) -> np.ndarray:
        """Return the mask float32 [1, 1, Q, H] of queries that are the newest tokens of their branches.

        The history holds the queries. (The source's also counts a tip twice, there and as a query.)
        """
        return additive_mask(seen_by_newest(np.asarray(history_bim), query_bim), jnp.float32)

    def _build_grow_tree_mask(
        self, query_bim: Sequence[int] | Array, history_bim: Sequence[int] | Array, tree_structure: Array
    ) -> np.ndarray:
        """Return the mask float32 [1, 1, Q, H + T] of draft tokens over the history and T temporary tokens.

        Args:
            query_bim: int [Q], the branch of each draft token.
            history_bim: int [H], -1 for the prefix; a token sees that, and its own branch.
            tree_structure: bool [Q, T], the temporary tokens that each one sees: its ancestors and itself. (The source
                has no KV of earlier levels in its mask.)
        """
        history, queries = np.asarray(history_bim), np.asarray(query_bim)[:, None]
        own_history = (history == TRUNK) | (history == queries)
        return additive_mask(np.concatenate([own_history, np.asarray(tree_structure, bool)], axis=1), jnp.float32)

    build_expand_root_mask, build_grow_tree_mask = _build_expand_root_mask, _build_grow_tree_mask

    def _trees(
        self,
        manager: BranchStateManager,
        tokens: np.ndarray,
        scores: np.ndarray,
        frontiers: np.ndarray,
        bases: np.ndarray,
    ) -> DraftTrees:
        """Return the trees of the best nodes of the pools [B, M]."""
        rows = len(tokens)
        tree = _best(
            tokens, scores, frontiers, self.total_tokens, np.full(rows, self.tree_depth), np.zeros(rows, np.float32)
        )
        parents, count = np.asarray(tree.parent), self.total_tokens
        mask = np.zeros((rows, count, count), bool)
        for node in range(count):  # parents come first
            above = np.take_along_axis(mask, np.maximum(parents[:, node], 0)[:, None, None], axis=1)[:, 0]
            mask[:, node] = above & (parents[:, node] != ROOT)[:, None]
            mask[:, node, node] = True
        found = (tree.tokens, parents, mask, tree.score, bases[:, None] + np.asarray(tree.depth))
        return DraftTrees(
            tuple(manager.active_branches), *(placed(np.asarray(values), manager.device) for values in found)
        )

    def _check(self, manager: BranchStateManager, needed: int) -> None:
        """Raise ValueError where `generate_draft_tree` says so."""
        cache, sequence = self.draft_kv_cache, manager.one_sequence
        if isinstance(self.forward, Eagle3Forward) and not manager.prefix_len:
            raise ValueError("state_manager: prefix_len is 0, allowed with an EAGLE-3 head is at least 1")
        if not manager.active_branches:
            raise ValueError("state_manager: it has no active branch, allowed is at least one")
        if needed > cache.capacity:
            raise ValueError(f"draft_kv_cache: {cache.capacity} slots, but {needed} are needed for this round")
        if self._held is None:
            if cache.current_length != manager.prefix_len:
                raise ValueError(
                    f"draft_kv_cache: it holds {cache.current_length} tokens, allowed are those of the prefix, "
                    f"{manager.prefix_len}; `prefill` computes them"
                )
        elif self._held != sequence.token_ids[: len(self._held)].tolist():
            raise ValueError(
                "state_manager: it holds other tokens than the draft_kv_cache, allowed is the same manager"
            )


def _with_own(above: np.ndarray) -> np.ndarray:
    """Return bool [B, k, T + k] of what tokens see, for a level of k tokens that each see themselves too."""
    rows, k, _ = above.shape
    return np.concatenate([above, np.broadcast_to(np.eye(k, dtype=bool), (rows, k, k))], axis=2)


def _top_k(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices int32 and the values of the k greatest, in order, ties to the lower index."""
    chosen = np.argsort(-values, axis=-1, kind="stable")[..., :k].astype(np.int32)
    return chosen, np.take_along_axis(values, chosen, axis=-1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    above = logits - logits.max(axis=-1, keepdims=True)
    return above - np.log(np.exp(above).sum(axis=-1, keepdims=True))


@partial(jax.jit, static_argnums=3)
def _best(tokens, scores, frontiers, num_nodes, wanted, entropy):
    return best_of_pool(tokens, scores, frontiers, num_nodes=num_nodes, wanted=wanted, entropy=entropy)
