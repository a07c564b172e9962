"""Table of draft methods, one row each. The device half of a method is imported on use: this module loads no JAX."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    from jaxinfer.config import EngineConfig
    from jaxinfer.models.config import ModelConfig
    from jaxinfer.speculative.proposer import Proposer
    from jaxinfer.speculative.tails import TailPages


class Beliefs(NamedTuple):
    """Expectations of a method before anything is measured."""

    drafts: float  # share of rounds that draft anything; 1: every round always does
    accepted: float  # share of drafts that are accepted


class StatePlace(NamedTuple):
    """Dtype and shardings of a drafter's state."""

    dtype: jnp.dtype
    pages: jax.sharding.Sharding | None  # of pages
    seats: jax.sharding.Sharding | None  # of arrays with one entry for each seat
    is_abstract: bool  # shapes only, to compile for


class DraftModule(Protocol):
    """Handling of a method's model, and its device half: `METHOD` of its module.

    `config` is the `SpeculativeConfig`; `drafter` is the method's model, with its parameters or with their shapes, and
    None where it has no model.
    """

    window: int | None  # number of last tokens that suffice to draft from; None: it needs all
    state: str  # name of the drafter's part of the engine's state

    def check(
        self, config: Any, target: Path | None, target_config: ModelConfig, max_model_len: int, **options: Any
    ) -> Any:
        """Return the configuration of the model, as far as it can be read before the target's weights.

        Raises:
            ValueError: the model does not fit the target; the message says what differs.
        """
        ...

    def load(
        self,
        config: Any,
        target_config: ModelConfig,
        checked: Any,
        *,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        **options: Any,
    ) -> Any:
        """Return the drafter; `checked` is the result of `check`."""
        ...

    def assembled(
        self,
        config: Any,
        target_config: ModelConfig,
        checked: Any,
        tensors: Iterable[tuple[str, Any]],
        *,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        **options: Any,
    ) -> Iterator[tuple[str, Any]]:
        """Yield the loaded drafter's leaves by path, made of tensors by their Hugging Face names in any order.

        Raises:
            ValueError: a tensor is unknown, comes twice or does not fit, or some are missing.
        """
        ...

    def plan(self, file: Path, target: ModelConfig, **options: Any) -> Any:
        """Return the configuration of a model from its `config.json`, to plan with."""
        ...

    def abstract(self, planned: Any, shapes: Callable[[Any], Mapping[str, Any]], devices: int, dtype: jnp.dtype) -> Any:
        """Return the drafter with shapes as parameters; `shapes` returns the shapes of a layout."""
        ...

    def layers(self, configuration: Any) -> ModelConfig | None:
        """Return the layers whose keys and values the drafter keeps, given the configuration of its model."""
        ...

    def proposer(self, config: Any, drafter: Any, tails: TailPages | None) -> Proposer:
        """Return the device half; `tails` are the pages in which trees are stored."""
        ...

    def make_state(self, engine: EngineConfig, drafter: Any, num_pages: int, place: StatePlace) -> Any:
        """Return the part of the engine's state named `state`, with `num_pages` pages."""
        ...


@dataclass(frozen=True)
class DraftMethod:
    """Draft method: its options, and the name of the module that implements it.

    Attributes:
        summary: what drafts, in words, for help texts.
        module: name of the module with `METHOD`, a `DraftModule`.
        beliefs: expectations of its chains.
        defaults: its options and their default values.
        model: the word for its model; None: it drafts without one.
        model_words: what has to be given as its model.
        embedded: the name of the embedded checkpoint for the embedded target.
        has_trees: whether it drafts trees.
        has_distributions: whether it samples drafts from distributions, whose entropy tells how sure it is.
    """

    name: str
    summary: str
    module: str
    beliefs: Beliefs
    defaults: Mapping[str, int] = field(default_factory=dict)
    model: str | None = None
    model_words: str = ""
    embedded: str | None = None
    has_trees: bool = False
    has_distributions: bool = True

    @property
    def device(self) -> DraftModule:
        """Handling of its model, and its device half; its module is imported here."""
        return importlib.import_module(self.module).METHOD


_ROWS = (
    DraftMethod(
        "draft_model",
        "a small model with the target's vocabulary",
        "jaxinfer.strategies.draft_model",
        Beliefs(drafts=1.0, accepted=0.6),
        {"num_speculative_tokens": 8},
        model="draft model",
        model_words="a model with the target's vocabulary",
        embedded="tiny-draft",
    ),
    DraftMethod(
        "ngram",
        "what followed the last time that the sequence ended in the same tokens",
        "jaxinfer.strategies.ngram",
        Beliefs(drafts=0.5, accepted=0.5),
        {"num_speculative_tokens": 5},
        has_distributions=False,
    ),
    DraftMethod(
        "eagle3",
        "a head on the target's own features, which drafts trees",
        "jaxinfer.strategies.eagle3",
        Beliefs(drafts=1.0, accepted=0.6),
        # The published defaults; their 60 nodes include the root.
        {"num_speculative_tokens": 59, "tree_depth": 7, "tree_top_k": 10},
        model="head",
        model_words="a head of the target",
        embedded="tiny-eagle3",
        has_trees=True,
    ),
)
METHODS = {row.name: row for row in _ROWS}
