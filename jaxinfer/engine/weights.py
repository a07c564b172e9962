"""The versions of an engine's weights: updates between steps, and why none may run."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint.errors import some_of
from jaxinfer.checkpoint.incoming import check_leaves
from jaxinfer.engine.compile_count import CompileCount
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.strategy import Strategy
from jaxinfer.engine.transactions import Transactions
from jaxinfer.programs.compiles import hearing_of_compiles
from jaxinfer.programs.digest import digest_of
from jaxinfer.programs.program import TARGET
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.weights import ModelWeights
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.version_runs import Version
from jaxinfer.scheduling.weights_change import change_weights

logger = logging.getLogger(__name__)

TARGET_MODEL, DRAFTER_MODEL = "target", "drafter"  # as users name them


class WeightsCore(Protocol):
    """What an update uses of the engine; see `EngineCore`."""

    runner: Runner
    metrics: EngineMetrics
    strategy: Strategy
    transactions: Transactions
    compiles: CompileCount

    @property
    def scheduler(self) -> Scheduler: ...

    def land_all(self) -> None: ...


class EngineWeights:
    """Weights of all models of one engine.

    Attributes:
        version: the version that the target's latest update was given, or its number.
        num_updates: complete updates of any model.
        updated: names of models whose weights are no longer those that they were loaded with.
    """

    def __init__(self, core: WeightsCore) -> None:
        self._core = weakref.proxy(core)
        self.version: Version = 0
        self.num_updates = 0
        self.updated: set[str] = set()
        self._logged: str | None = None
        self._new: dict[str, set[str]] = {}  # of each model whose update has not ended: leaves that are replaced

    def note(self, requests: Iterable[Request]) -> None:
        """Tag the further tokens of requests with the version of now."""
        for request in requests:
            if not request.is_finished:
                request.versions.note(request.num_landed_tokens, self.version)

    def of(self, model: str) -> ModelWeights:
        """Return the weights of "target" or "drafter".

        Raises:
            ValueError: the engine has no such model.
        """
        return self._core.runner.weights[self._name_of(model)]

    def _name_of(self, model: str) -> str:
        if model == TARGET_MODEL:
            return TARGET
        drafters = [name for name in self._core.runner.weights if name != TARGET]
        if model != DRAFTER_MODEL:
            raise ValueError(f'model must be "target" or "drafter", got {model!r}')
        if not drafters:
            raise ValueError("this engine has no drafter with weights")
        return drafters[0]

    def check_alone(self) -> None:
        """Raise RuntimeError if other processes share the model: they would have to update it too."""
        self._core.runner.check_alone("an update of the weights")

    def digest(self, model: str) -> str:
        """Return a digest of a model's weights, see `digest_of`.

        Raises:
            ValueError: the engine has no such model.
            RuntimeError: its weights are not on the device.
        """
        weights = self.of(model)
        self._core.runner.check_alone("a digest of the weights")
        if not weights.are_here:
            raise RuntimeError(f"the weights are not on the device: {self.obstacle() or 'call wake_up'}")
        with hearing_of_compiles(lambda: None):
            return digest_of(weights)

    def update(
        self,
        leaves: Mapping[str, Any] | Iterable[tuple[str, Any]],
        version: Version,
        model: str,
        *,
        is_lent: bool,
        is_reload: bool = False,
    ) -> None:
        """Replace all leaves of a model, once what is in flight has landed.

        Args:
            leaves: arrays by path; all of them are checked before the first one is replaced. Or pairs of path and
                array, one after the other.
            version: None: the number of the update.
            is_lent: whether a caller keeps these arrays. Where the engine owns its leaf they are copied into its
                memory; else they take its place.
            is_reload: these are the weights that the model was loaded with, again: the version stays.

        Raises:
            ValueError: a leaf is missing or unknown, was deleted, or has another shape or type.
        """
        name = self._name_of(model)
        weights = self._core.runner.weights[name]
        self.check_alone()
        if isinstance(leaves, Mapping):
            found: dict[str, Any] = {str(path): leaf for path, leaf in leaves.items()}
            check_leaves({path: jnp.shape(leaf) for path, leaf in found.items()}, weights.shapes_of_leaves)
            for path, leaf in found.items():
                self._check_leaf(weights, path, leaf)
            pairs: Iterable[tuple[str, Any]] = found.items()
        else:
            pairs = leaves
        failure: list[Exception] = []

        def replace() -> None:
            self._core.land_all()
            begin = time.perf_counter()
            try:
                self._replace(name, weights, pairs, is_lent=is_lent)
            except Exception as error:  # after the step, which is whole: nothing has to be computed again
                failure.append(error)
                return
            if not is_reload:
                self._count(model, version, time.perf_counter() - begin)
            self._changed(name)
            self._new.pop(name, None)  # until here an interruption leaves weights that are not whole

        with hearing_of_compiles(partial(self._core.compiles.in_update, is_first=model not in self.updated)):
            self._core.transactions.between_steps(replace, hands_out=True)
        if failure:
            raise failure[0]

    def _count(self, model: str, version: Version, seconds: float) -> None:
        metrics = self._core.metrics
        self.num_updates += 1
        self.updated.add(model)
        if model == TARGET_MODEL:  # a drafter changes no token
            self.version = self.num_updates if version is None else version
            metrics.weights_version = str(self.version)
        metrics.num_weights_updates_total += 1
        metrics.weights_update_seconds_total += seconds

    def _changed(self, name: str) -> None:
        """Continue with other weights: nothing of the old ones is found again."""
        core = self._core
        if name == TARGET:
            self.note(core.transactions.requests.values())
            change_weights(core.scheduler, recompute=core.strategy.takes_prompts)
        core.scheduler.continue_from(core.strategy.weights_changed(name, core.scheduler.running))

    def _replace(self, name: str, weights: ModelWeights, leaves: Iterable[tuple[str, Any]], *, is_lent: bool) -> None:
        done: set[str] = set()
        for path, leaf in leaves:
            if path not in weights.number:
                raise ValueError(f"the model has no leaf {path}")
            self._check_leaf(weights, path, leaf)
            self._new[name] = done
            weights.replace(weights.number[path], leaf, is_lent=is_lent)
            done.add(path)
        missing = weights.number.keys() - done
        if missing:
            raise ValueError(f"the update has ended without leaves {some_of(sorted(missing))}")

    def _check_leaf(self, weights: ModelWeights, path: str, leaf: Any) -> None:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(f"the new leaf {path} was deleted or donated: give the arrays that took its place")
        wanted = weights.wanted[weights.number[path]].dtype
        given = jnp.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype
        if given != wanted and not (jnp.issubdtype(given, jnp.floating) and jnp.issubdtype(wanted, jnp.floating)):
            raise ValueError(f"leaf {path} has type {given}, the engine's has {wanted}")

    def obstacle(self) -> str | None:
        """Return why nothing may be launched; None: the weights are whole. A new reason is logged."""
        reason = self._obstacle()
        if reason is not None and reason != self._logged:
            logger.warning("nothing is launched: %s", reason)
        self._logged = reason
        return reason

    def _obstacle(self) -> str | None:
        for name, done in self._new.items():
            old = [path for path in self._core.runner.weights[name].paths if path not in done]
            return (
                f"the weights are not whole: an update has failed after new leaves {some_of(sorted(done))}; "
                f"old are {some_of(old)}: call update_weights again"
            )
        for weights in self._core.runner.weights.values():
            if weights.may_be_lost and (lost := weights.lost()):
                return (
                    f"arrays of the weights are gone, deleted, donated or dropped ({some_of(lost)}): call "
                    "update_weights with new ones"
                )
        return None
