"""The automaton on the device: the requests that follow it, and its replacement once none follows it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.constraints.automaton import TokenAutomaton
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.programs.program import CONSTRAINT, everywhere_on
from jaxinfer.programs.runner import Runner
from jaxinfer.sampling.constraint import Automaton, AutomatonLimits, Constraint, Words
from jaxinfer.scheduling.request import Request

logger = logging.getLogger(__name__)


class DeviceConstraints:
    """Constraints on the device, which has one automaton at a time. If a request brings another one while requests of
    the first run, or one that is too large, the host applies it, token by token: the tokens are the same.

    Args:
        vocabulary: vocabulary of the target.
        mesh: devices of the engine.
        limits: size limits of automata.
    """

    def __init__(self, vocabulary: Vocabulary, mesh: Mesh | None, limits: AutomatonLimits | None = None) -> None:
        self.vocabulary = vocabulary
        self._limits = AutomatonLimits() if limits is None else limits
        self._whole = everywhere_on(mesh)
        self._words = self._put(Words.of(vocabulary.pieces))
        self._current: TokenAutomaton[Any] | None = None
        self._held: list[Request] = []

    @property
    def model(self) -> Constraint:
        """The argument that programs are compiled for: a vocabulary, and an empty automaton."""
        return Constraint(self._words, self._put(Automaton.empty(self._limits, self.vocabulary.size)))

    def enter(self, request: Request, runner: Runner) -> None:
        """Let the device apply the constraint of a new request, if it can."""
        self.drop_finished()
        automaton = request.constraint
        if automaton is None:
            return
        if automaton is not self._current:
            if self._held:
                return
            arrays = automaton.on_device(self._limits)
            if arrays is None:
                logger.debug("an automaton of more than %s is followed by the host", self._limits)
                return
            runner.set_model(CONSTRAINT, Constraint(self._words, self._put(arrays)))
            self._current = automaton
        request.constrain_on_device()
        self._held.append(request)

    def start_over(self, requests: Sequence[Request], runner: Runner) -> None:
        """Decide anew for which of these requests the device applies the constraint."""
        self._current, self._held = None, []
        for request in requests:
            self.enter(request, runner)

    def drop_finished(self) -> None:
        """Drop requests that have ended, so that their memory is freed and another automaton may take over."""
        self._held = [request for request in self._held if not request.is_finished]

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._whole)
