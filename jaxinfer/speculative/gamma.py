"""How many tokens to draft: always as many, or fewer where the drafter is in doubt. What is chosen changes no token."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxinfer.speculative.costs import LaunchCosts
from jaxinfer.speculative.egag import EntropyGamma

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What the rounds of a launch draft for R sequences; no drafts at all: the plain program."""

    drafts: np.ndarray  # int [R], tokens one after the other at most
    num_nodes: int = 0  # of trees; 0: chains
    is_trial: bool = False  # what is tried once, to learn of it: one round is enough


@dataclass(frozen=True)
class RoundsReport:
    """What became of a launch of N rounds of R sequences."""

    seats: np.ndarray  # int [R]
    ran: np.ndarray  # bool [N, R], whether the sequence took part in the round
    wanted: np.ndarray  # int [R], drafts that were asked for
    drafted: np.ndarray  # int [N, R], of a tree its depth
    accepted: np.ndarray  # int [N, R]
    entropy: np.ndarray  # float [N, R], of the drafter's last distribution in nats
    num_nodes: int = 0  # of trees; 0: chains


@dataclass(frozen=True)
class TimedLaunch:
    """What a launch took of the device."""

    num_drafts: int  # wanted at most; 0: a plain launch
    rows: int
    pages_per_row: int
    rounds: int  # that ran, or steps
    seconds: float  # of all of them
    rounds_without: int = 0  # of these, those in which nothing was drafted for anybody
    num_nodes: int = 0  # of trees; 0: chains


# The seat of a sequence that has none yet. Arrays by seats have one more entry, which this index leads to: what is
# believed of a sequence of which nothing is known.
NO_SEAT = -1


class GammaController(Protocol):
    """Chooses what a launch drafts, and hears what came of it."""

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        """What to draft in each round of a launch for the R sequences in these seats, any of which may be `NO_SEAT`."""
        ...

    def would_draft(self, rows: int, pages_per_row: int) -> bool:
        """Whether any drafts were chosen for so many sequences: then a drafter is fed with their prompts."""
        ...

    def enter(self, seat: int) -> None:
        """Another sequence has the seat."""
        ...

    def observe(self, report: RoundsReport) -> None:
        """What came of a launch of rounds."""
        ...

    @property
    def costs(self) -> LaunchCosts | None:
        """Where measured costs of launches belong, if it wants to know them."""
        ...

    def timed(self, launch: TimedLaunch) -> None:
        """A launch was timed."""
        ...


class FixedGamma:
    """Always as many, in trees of so many nodes or, with 0, in chains."""

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
    """Fewer drafts for sequences whose drafter is in doubt: `EntropyGamma` for each, fed once a round.

    What a launch finds out counts from the next launch on that is built after it has landed. Entropies and lengths of
    each round are logged at level DEBUG.
    """

    def __init__(
        self,
        num_seats: int,
        vocab_size: int,
        *,
        gamma_min: int,
        gamma_max: int,
        ema_beta: float = 0.0,
        num_nodes: int = 0,
    ) -> None:
        super().__init__(gamma_max, num_nodes)
        self._make = lambda: EntropyGamma(vocab_size, gamma_min, gamma_max, ema_beta)
        self._rules = [self._make() for _ in range(num_seats)]
        self._lengths = np.full(num_seats + 1, gamma_max)  # the last entry is that of NO_SEAT, and stays

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
