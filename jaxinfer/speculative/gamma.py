"""Controllers of the number of drafts: fixed, or fewer where the drafter is uncertain. They change no token."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxinfer.speculative.costs import LaunchCosts
from jaxinfer.speculative.egag import EntropyGamma, EntropyScale

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """Drafts per round of a launch for R sequences; with none at all, the plain program runs."""

    drafts: np.ndarray  # int [R], most drafts along a path
    num_nodes: int = 0  # of trees; 0: chains
    is_trial: bool = False  # a probe to learn from: one round is enough


@dataclass(frozen=True)
class RoundsReport:
    """Outcome of a launch of N rounds of R sequences."""

    seats: np.ndarray  # int [R]
    ran: np.ndarray  # bool [N, R], whether the sequence took part in the round
    wanted: np.ndarray  # int [R], drafts that were asked for
    drafted: np.ndarray  # int [N, R], drafts along a path (for a tree, its depth)
    accepted: np.ndarray  # int [N, R]
    entropy: np.ndarray  # float [N, R], of the drafter's last distribution in nats
    num_nodes: int = 0  # of trees; 0: chains


@dataclass(frozen=True)
class TimedLaunch:
    """Device time of a launch."""

    num_drafts: int  # most that a row wanted; 0: a plain launch
    rows: int
    pages_per_row: int
    rounds: int  # rounds or plain steps that ran
    seconds: float  # of all rounds together
    rounds_without: int = 0  # of these rounds, those in which nothing was drafted for any row
    num_nodes: int = 0  # of trees; 0: chains


# The seat of a sequence that has none yet. Arrays by seats have one more entry, at this index: the prior for a sequence
# without a record.
NO_SEAT = -1


class GammaController(Protocol):
    """Controller that chooses what a launch drafts, and observes the outcome."""

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        """Choose the drafts of each round of a launch for R sequences in these seats, any of which may be `NO_SEAT`."""
        ...

    def would_draft(self, rows: int, pages_per_row: int) -> bool:
        """Whether it would choose any drafts for so many sequences; if so, the drafter takes in their prompts."""
        ...

    def enter(self, seat: int) -> None:
        """Note that another sequence has entered the seat."""
        ...

    def observe(self, report: RoundsReport) -> None:
        """Observe the outcome of a launch of rounds."""
        ...

    @property
    def costs(self) -> LaunchCosts | None:
        """The store of measured launch costs, if it uses them."""
        ...

    def timed(self, launch: TimedLaunch) -> None:
        """Observe the time of a launch."""
        ...


class FixedGamma:
    """Controller with a fixed number of drafts, in trees of `num_nodes` nodes or, with 0, in chains."""

    costs: LaunchCosts | None = None

    def __init__(self, num_drafts: int, num_nodes: int = 0) -> None:
        self.num_drafts, self.num_nodes = num_drafts, num_nodes

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        return Choice(np.full(len(seats), self.num_drafts), self.num_nodes)

    def would_draft(self, rows: int, pages_per_row: int) -> bool:
        return True

    def enter(self, seat: int) -> None:
        pass

    def observe(self, report: RoundsReport) -> None:
        pass

    def timed(self, launch: TimedLaunch) -> None:
        pass


class EntropyController(FixedGamma):
    """Controller with fewer drafts for sequences whose drafter is uncertain: one `EntropyGamma` each, fed every round.

    The outcome of a launch counts for launches that are built after it has landed. Entropies and lengths of each round
    are logged at level DEBUG.
    """

    def __init__(
        self,
        num_seats: int,
        vocab_size: int,
        *,
        gamma_min: int,
        gamma_max: int,
        ema_beta: float = 0.0,
        scale: EntropyScale = "vocabulary",
        num_nodes: int = 0,
    ) -> None:
        super().__init__(gamma_max, num_nodes)
        self._make = lambda: EntropyGamma(vocab_size, gamma_min, gamma_max, ema_beta, scale)
        self._rules = [self._make() for _ in range(num_seats)]
        self._lengths = np.full(num_seats + 1, gamma_max)  # the last entry is for NO_SEAT, and stays

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        return Choice(self._lengths[seats], self.num_nodes)

    def enter(self, seat: int) -> None:
        self._rules[seat] = self._make()
        self._lengths[seat] = self.num_drafts

    def observe(self, report: RoundsReport) -> None:
        for number, row in np.argwhere(report.drafted > 0).tolist():
            seat = int(report.seats[row])
            found = self._rules[seat].observe(float(report.entropy[number, row]))
            self._lengths[seat] = found.gamma
            logger.debug(
                "seat %d: %d drafted, %d accepted, entropy %.3f of ln V, smoothed %.3f: %d drafts next",
                seat, report.drafted[number, row], report.accepted[number, row], found.normalised, found.smoothed,
                found.gamma,
            )  # fmt: skip
