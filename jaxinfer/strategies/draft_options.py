"""`SpeculativeConfig`: how tokens are drafted, validated when it is made. Importing this module loads no JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.field_checks import check_positive_integer, fields_of
from jaxinfer.speculative.egag import EntropyScale, check_entropy_scale
from jaxinfer.strategies.draft_methods import METHODS, DraftMethod

ADAPTIVE = ("cost", "entropy")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Configuration of speculative decoding. It changes how fast tokens come, never which tokens come.

    Attributes:
        method: "draft_model" (a small model with the target's vocabulary), "ngram" (what followed the last time that
            the sequence ended in the same tokens) or "eagle3" (a head on the target's own features, which drafts
            trees).
        model: the draft model, or the head: a converted directory, a Hugging Face directory or a hub id. None: the
            embedded one, for the embedded target.
        num_speculative_tokens: most tokens drafted in a round; for trees, nodes of a tree besides the root. None: 8 for
            a draft model, 5 for n-grams, 59 for trees.
        tree_depth: for trees, levels of a tree after the first; up to `tree_depth` + 1 tokens can be accepted. None: 7.
        tree_top_k: for trees, nodes of a level that the next level extends, and children of each. 1: a chain. None: 10.
        prompt_lookup_min, prompt_lookup_max: lengths of the shortest and the longest n-gram that is looked up.
        adaptive: "cost" drafts the number of tokens that gives the most tokens per second for the current batch, which
            may be 0; "entropy" drafts fewer where the draft model is uncertain; None always drafts the same number.
        gamma_min, gamma_max: with "entropy", the fewest and the most tokens that are drafted one after the other (None:
            as many as the other options allow).
        egag_ema_beta: with "entropy", the weight of earlier rounds, in [0, 1).
        entropy_scale: with "entropy", the entropy that counts as uncertain, as a share of ln V: "vocabulary" is all of
            it, "running" the greatest observed so far of the sequence, or a number in (0, 1].

    Raises:
        ValueError: a field is out of range; the message has its name, its value and what is allowed.
    """

    method: str
    model: str | os.PathLike[str] | None = None
    num_speculative_tokens: int | None = None
    tree_depth: int | None = None
    tree_top_k: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    adaptive: str | None = "cost"
    gamma_min: int = 1
    gamma_max: int | None = None
    egag_ema_beta: float = 0.0
    entropy_scale: EntropyScale = "vocabulary"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        method = self.row
        for name in ("tree_depth", "tree_top_k"):
            if not method.has_trees and getattr(self, name) is not None:
                trees = " or ".join(repr(row.name) for row in METHODS.values() if row.has_trees)
                raise ValueError(f"{name} is of method={trees}, got method={self.method!r}")
        for name, value in method.defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
            check_positive_integer(name, getattr(self, name))
        longest = self._longest
        if self.gamma_max is None:
            object.__setattr__(self, "gamma_max", longest)
        for name in ("prompt_lookup_min", "prompt_lookup_max", "gamma_min", "gamma_max"):
            check_positive_integer(name, getattr(self, name))
        assert self.gamma_max is not None
        if self.gamma_max > longest:
            raise ValueError(
                f"gamma_max ({self.gamma_max}) must be at most {longest}, the most tokens that are drafted one after "
                "the other"
            )
        if self.adaptive not in (*ADAPTIVE, None):
            raise ValueError(f"adaptive must be one of {', '.join(ADAPTIVE)} or None, got {self.adaptive!r}")
        if self.adaptive == "entropy" and not method.has_distributions:
            raise ValueError(
                f"adaptive='entropy' looks at a draft model's distributions, and method={self.method!r} has none"
            )
        for small, large in (("prompt_lookup_min", "prompt_lookup_max"), ("gamma_min", "gamma_max")):
            if getattr(self, small) > getattr(self, large):
                raise ValueError(f"{small} ({getattr(self, small)}) must be at most {large} ({getattr(self, large)})")
        if not 0 <= self.egag_ema_beta < 1:
            raise ValueError(f"egag_ema_beta must be in [0, 1), got {self.egag_ema_beta!r}")
        check_entropy_scale(self.entropy_scale)
        if self.model is not None and method.model is None:
            raise ValueError(f"method={self.method!r} drafts without a model, got model={os.fspath(self.model)!r}")

    @property
    def row(self) -> DraftMethod:
        """Row of the method in `METHODS`."""
        return METHODS[self.method]

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any]) -> SpeculativeConfig:
        """Return the configuration itself, or one made from a dict of its fields.

        Raises:
            ValueError: as for the class, or a key is no field of it.
        """
        if isinstance(value, cls):
            return value
        given = fields_of(cls, "speculative_config", value)
        if "method" not in given:
            raise ValueError(f"speculative_config needs a method: one of {', '.join(METHODS)}")
        return cls(**given)

    @property
    def most_drafts(self) -> int:
        """Most tokens that a round drafts one after the other."""
        most = self.gamma_max if self.adaptive == "entropy" else self._longest
        assert most is not None
        return most

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree besides the root; 0: only chains are drafted."""
        if not self.row.has_trees or self.tree_top_k == 1:
            return 0
        assert self.num_speculative_tokens is not None
        return min(self.num_speculative_tokens, self._pool_size)

    @property
    def _pool_size(self) -> int:
        """Candidate nodes, of which a tree keeps the best."""
        assert self.tree_depth is not None and self.tree_top_k is not None
        return self.tree_top_k + self.tree_depth * self.tree_top_k**2

    @property
    def _longest(self) -> int:
        """Most tokens on one path through the drafts of a round."""
        assert self.num_speculative_tokens is not None
        if not self.row.has_trees:
            return self.num_speculative_tokens
        assert self.tree_depth is not None
        return min(self.num_speculative_tokens, self.tree_depth + 1)
