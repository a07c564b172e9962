"""EAGLE-3 drafting written out in NumPy: the head, the tree that it grows, and ways to get both wrong.

After the EAGLE project's EAGLE-3 head and EAGLE-2 tree. Nothing is shared with the engine. Every path of the tree
carries all keys and values that it sees, so that there is neither a cache nor a mask to get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.speculative.decoder_numpy import (
    Checkpoint,
    attend,
    capture_layers,
    forward,
    gated_mlp,
    linear,
    log_softmax,
    project,
    random_kernel,
    random_layer,
    random_scale,
    rms_norm,
    rope_theta,
)

# (position in the sequence of the token to be drawn, target token ids [n]) -> what is added to their logits [n].
Noise = Callable[[int, np.ndarray], np.ndarray]

# Mistakes that `draft_tree` can make on purpose. Each changes its trees, those of growth from depth 1 on.
BUGS = (
    "wrong capture layer",  # the input of the layer after each right one
    "final norm applied to features",  # the target's, on each captured part
    "target's rope",  # the target's rope_theta in the head
    "growth position not shifted",  # drafted tokens have the target's positions in the head, one too far
    "residual from the normalised hidden",
    "growth fed after norm",  # the head's final norm, on the output that the next step continues from
    "stale head KV",  # rows of the last accepted tokens as the head drafted them, not from the target's features
)
# Mistakes that no tree can show: rotary attention sees differences of positions only.
HARMLESS_BUGS = ("head position not shifted",)  # all positions of the head one too far
# Those before the row that the tree starts from, which is right, and never the first: it takes 4 tokens to have one.
STALE_ROWS = 3


@dataclass(frozen=True)
class Tree:
    """Drafted tokens in the order of their pool indices: parents stand before their children. The root is not in it.

    Attributes:
        tokens: int [N], target token ids.
        parents: int [N], the number of each node's parent, -1 where that is the root.
        scores: float [N], cumulative log-probability of the path from the root.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray

    def path(self, node: int) -> tuple[int, ...]:
        """Token ids from the root's child to the node."""
        if node < 0:
            return ()
        return (*self.path(int(self.parents[node])), int(self.tokens[node]))

    def paths(self) -> dict[tuple[int, ...], float]:
        """The score of every path of token ids that starts below the root, in the order of the nodes."""
        return {self.path(node): float(score) for node, score in enumerate(self.scores)}


def draft_tree(
    head: Checkpoint,
    target: Checkpoint,
    tokens: Sequence[int],
    *,
    depth: int,
    top_k: int,
    num_nodes: int,
    noise: Noise | None = None,
    capture: Sequence[int] | None = None,
    bug: str | None = None,
) -> Tree:
    """The tree that EAGLE-3 drafts after `tokens`.

    Args:
        tokens: the whole sequence so far, L + 1 token ids with L > 0. The last is the root: the target has chosen it
            and has computed only those before it.
        depth: levels after the first; nodes lie up to depth + 1 below the root.
        top_k: children of each node that is expanded, and nodes that are expanded in each level.
        num_nodes: how many of the pool's top_k + depth * top_k**2 candidates the tree keeps.
        noise: temperature times Gumbel noise, added to the logits before they are normalised; None for greedy.
        capture: see `forward`.
        bug: one of `BUGS` or `HARMLESS_BUGS`.

    Raises:
        ValueError: the pool or the head's vocabulary is too small, there is only one token, or `bug` has no such name.
    """
    if bug is not None and bug not in BUGS + HARMLESS_BUGS:
        raise ValueError(f"bug={bug!r} is none of {BUGS + HARMLESS_BUGS}")
    if len(tokens) < 2:
        raise ValueError("before the root there must be a token, which the features are taken from")
    if num_nodes > top_k + depth * top_k**2:
        raise ValueError(f"num_nodes={num_nodes} of a pool of {top_k + depth * top_k**2}")
    drafter = _Head(head, target, bug)
    features = _features(target, tokens[:-1], capture, bug)

    pool_tokens, pool_parents, pool_scores = [], [], []
    seen = {-1: drafter.committed(features, tokens)}  # what a pool index has seen, itself included

    def add_children(parent: int, position: int) -> None:
        found, log_probs = drafter.likeliest(seen[parent], top_k, position, noise)
        pool_tokens.extend(found)
        pool_parents.extend([parent] * top_k)
        pool_scores.extend(log_probs + (pool_scores[parent] if parent >= 0 else 0.0))

    add_children(-1, len(tokens))
    level = range(top_k)
    for step in range(depth):
        frontier = [level[i] for i in _best([pool_scores[node] for node in level], top_k)]
        start = len(pool_tokens)
        for node in frontier:
            seen[node] = drafter.drafted(seen[pool_parents[node]], pool_tokens[node], len(tokens) - 1 + step)
            add_children(node, len(tokens) + 1 + step)
        level = range(start, len(pool_tokens))

    kept = sorted(_best(pool_scores, num_nodes))
    number = {-1: -1} | {index: node for node, index in enumerate(kept)}
    return Tree(
        np.array([pool_tokens[index] for index in kept]),
        np.array([number[pool_parents[index]] for index in kept]),
        np.array([pool_scores[index] for index in kept]),
    )


def accepted(tree: Tree, choose: Callable[[tuple[int, ...]], int]) -> tuple[tuple[int, ...], int]:
    """The path of drafts that the target agrees with, and the token that it adds to them.

    Args:
        choose: the target's next token after the root and a path of drafts.
    """
    paths, path = tree.paths(), ()
    while (*path, token := choose(path)) in paths:
        path = (*path, token)
    return path, token


def random_head(
    rng: np.random.Generator,
    target_config: Mapping[str, Any],
    *,
    draft_vocab_size: int = 40,
    rope_theta: float | None = None,
    own_embedding: bool = False,
) -> Checkpoint:
    """A head for a target, of the target's hidden size, all of whose weights matter.

    Its vocabulary is `draft_vocab_size` of the target's tokens; `rope_theta` is None for a configuration without it.
    """
    hidden, vocab_size = target_config["hidden_size"], target_config["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    if rope_theta is not None:
        config["rope_theta"] = rope_theta
    drafted = np.sort(rng.choice(vocab_size, draft_vocab_size, replace=False))
    tensors = {
        "fc.weight": random_kernel(rng, hidden, 3 * hidden, scale=1),
        "midlayer.hidden_norm.weight": random_scale(rng, hidden),
        "midlayer.input_layernorm.weight": random_scale(rng, hidden),
        **random_layer(rng, "midlayer.", config, inputs=2 * hidden),
        "norm.weight": random_scale(rng, hidden),
        "lm_head.weight": random_kernel(rng, draft_vocab_size, hidden),
        "d2t": drafted - np.arange(draft_vocab_size),
        "t2d": np.isin(np.arange(vocab_size), drafted),
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = random_kernel(rng, vocab_size, hidden, scale=1)
    return Checkpoint(config, tensors)


@dataclass(frozen=True)
class _Seen:
    """n rows of the head, each of which sees those before it: keys and values [n, kv_heads, d]; the last's output."""

    keys: np.ndarray
    values: np.ndarray
    output: np.ndarray  # [hidden], before the head's final norm


class _Head:
    def __init__(self, head: Checkpoint, target: Checkpoint, bug: str | None) -> None:
        self.config, self.tensors = head
        self.bug = bug
        if bug == "target's rope":
            targets = {"rope_scaling": None, "rope_parameters": {"rope_theta": rope_theta(target.config)}}
            self.config = {**self.config, **targets}
        own = self.tensors.get("embed_tokens.weight")
        self.embeddings = target.tensors["model.embed_tokens.weight"] if own is None else own
        offsets = self.tensors.get("d2t")
        draft_ids = np.arange(len(self.tensors["lm_head.weight"]))
        self.token_ids = draft_ids if offsets is None else draft_ids + offsets  # [draft vocab], of the target

    def committed(self, features: np.ndarray, tokens: Sequence[int]) -> _Seen:
        """Row i of the L committed tokens: feature i [features], the embedding of token i + 1, position i."""
        kv_heads = self.config["num_key_value_heads"]
        nothing = np.empty((0, kv_heads, len(self.tensors["midlayer.self_attn.k_proj.weight"]) // kv_heads))
        seen = _Seen(nothing, nothing, np.empty(0))
        last = len(features) - 1
        for i, feature in enumerate(features):
            stale = self.bug == "stale head KV" and max(1, last - STALE_ROWS) <= i < last
            hidden = seen.output if stale else self._reduced(feature)
            seen = self._row(seen, hidden, tokens[i + 1], i)
        return seen

    def drafted(self, seen: _Seen, token: int, position: int) -> _Seen:
        """Add one row, which continues from the output of the one before."""
        hidden = seen.output
        if self.bug == "growth fed after norm":
            hidden = self._norm("norm", hidden)
        return self._row(seen, hidden, token, position + (self.bug == "growth position not shifted"))

    def likeliest(self, seen: _Seen, top_k: int, position: int, noise: Noise | None) -> tuple[list[int], np.ndarray]:
        """The `top_k` best tokens at a position of the sequence, best first, and their log-probabilities [top_k]."""
        if top_k > len(self.token_ids):
            raise ValueError(f"top_k={top_k} of a head that knows {len(self.token_ids)} tokens")
        logits = linear(self.tensors, "lm_head", self._norm("norm", seen.output))
        if noise is not None:
            logits = logits + noise(position, self.token_ids)
        log_probs = log_softmax(logits)
        best = _best(log_probs, top_k)
        return [int(self.token_ids[i]) for i in best], log_probs[best]

    def _reduced(self, feature: np.ndarray) -> np.ndarray:
        """[hidden] of a feature [F * hidden of the target]; `fc` is only for features of another width."""
        return feature if len(feature) == self.config["hidden_size"] else linear(self.tensors, "fc", feature)

    def _row(self, seen: _Seen, hidden: np.ndarray, token: int, position: int) -> _Seen:
        position += self.bug == "head position not shifted"
        normed = self._norm("midlayer.hidden_norm", hidden)
        embedding = self._norm("midlayer.input_layernorm", self.embeddings[token].astype(np.float64))
        both = np.concatenate([embedding, normed])[None]
        q, k, v = project(self.config, self.tensors, "midlayer.self_attn.", both, np.array([position]))
        keys, values = np.concatenate([seen.keys, k]), np.concatenate([seen.values, v])
        attended = attend(q, keys, values, np.ones((1, len(keys)), bool))[0]
        residual = normed if self.bug == "residual from the normalised hidden" else hidden
        x = residual + linear(self.tensors, "midlayer.self_attn.o_proj", attended)
        x = x + gated_mlp(self.tensors, "midlayer.mlp.", self._norm("midlayer.post_attention_layernorm", x))
        return _Seen(keys, values, x)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.tensors[name + ".weight"], self.config["rms_norm_eps"])


def _features(target: Checkpoint, tokens: Sequence[int], capture: Sequence[int] | None, bug: str | None) -> np.ndarray:
    """[T, F * hidden] of T tokens."""
    config, tensors = target
    layers = capture_layers(config["num_hidden_layers"]) if capture is None else capture
    if bug == "wrong capture layer":
        layers = [layer + 1 for layer in layers]
    features = forward(target, tokens, layers).features
    if bug == "final norm applied to features":
        parts = features.reshape(len(tokens), len(layers), -1)
        features = rms_norm(parts, tensors["model.norm.weight"], config["rms_norm_eps"]).reshape(features.shape)
    return features


def _best(scores: Sequence[float] | np.ndarray, count: int) -> list[int]:
    """Indices of the `count` greatest, greatest first; of equal ones the lower index."""
    return np.argsort(-np.asarray(scores), kind="stable")[:count].tolist()
