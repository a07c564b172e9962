"""The methods of drafting, a row each. What a method does on devices is loaded when it is used: no JAX is here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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
    """What is expected of a method before anything was seen."""

    drafts: float  # the share of rounds in which anything is drafted; 1: in all of them, always
    accepted: float  # the share of drafts that is accepted


class StatePlace(NamedTuple):
    """Where a drafter's state is stored."""

    dtype: jnp.dtype
    pages: jax.sharding.Sharding | None  # of pages
    seats: jax.sharding.Sharding | None  # of what there is one of for each seat
    is_abstract: bool  # shapes alone, to compile for


class DraftModule(Protocol):
    """What a method does with its model and on devices: `METHOD` of its module.

    `config` is the `SpeculativeConfig`; `drafter` is the method's model, with its parameters or with their shapes, and
    None where it has no model.
    """

    window: int | None  # the last tokens of a sequence that are enough to draft from; None: it needs all
    state: str  # the part of the engine's state that is the drafter's

    def check(self, config: Any, target: Path, of_target: ModelConfig, max_model_len: int, **options: Any) -> Any:
        """Return the configuration of the model, as far as it can be read before the target's weights.

        Raises:
            ValueError: it does not go with the target; says what differs.
        """
        ...

    def load(
        self,
        config: Any,
        of_target: ModelConfig,
        checked: Any,
        *,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        **options: Any,
    ) -> Any:
        """Return the drafter; `checked` is what `check` has returned."""
        ...

    def plan(self, file: Path, target: ModelConfig, **options: Any) -> Any:
        """Return the configuration of the model in a `config.json`, to plan with."""
        ...

    def abstract(self, planned: Any, shapes: Callable[[Any], Mapping[str, Any]], devices: int, dtype: jnp.dtype) -> Any:
        """Return the drafter with shapes for parameters; `shapes` gives those of a layout."""
        ...

    def layers(self, configuration: Any) -> ModelConfig | None:
        """Return the layers of which the drafter keeps keys and values, from the configuration of its model."""
        ...

    def proposer(self, config: Any, drafter: Any, tails: TailPages | None) -> Proposer:
        """Return the device's half; `tails` is where trees are stored."""
        ...

    def make_state(self, engine: EngineConfig, drafter: Any, num_pages: int, place: StatePlace) -> Any:
        """Return the part of the state that is called `state`, with so many pages."""
        ...


@dataclass(frozen=True)
class DraftMethod:
    """A method: its options, and the name of the module that has the rest.

    Attributes:
        summary: what drafts, in words, for help texts.
        module: where `METHOD`, a `DraftModule`, is.
        beliefs: what is expected of its chains.
        defaults: options that it has, with their values where none are given.
        model: what its model is called; None: it drafts without one.
        model_words: what has to be given as its model.
        embedded: the name of the embedded checkpoint that goes with the embedded target.
        has_trees: whether it drafts trees.
        has_distributions: whether it draws drafts from distributions, whose entropy tells how sure it is.
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
        """What it does with its model and on devices."""
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
        # The published ones, whose 60 nodes count the root.
        {"num_speculative_tokens": 59, "tree_depth": 7, "tree_top_k": 10},
        model="head",
        model_words="a head of the target",
        embedded="tiny-eagle3",
        has_trees=True,
    ),
)
METHODS = {row.name: row for row in _ROWS}
