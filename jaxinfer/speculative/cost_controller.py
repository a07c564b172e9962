"""Cost controller: chooses the number of drafts with the most tokens per second for a batch, which may be none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxinfer.speculative.acceptance import Acceptance, Forecast
from jaxinfer.speculative.costs import Key, LaunchCosts
from jaxinfer.speculative.gamma import Choice, RoundsReport, TimedLaunch

# Measurements are not exact: drafting has to promise this gain over plain decoding.
_MARGIN = 1.02
# A program is tried until it was timed `_FEW_TIMES`, at most `_MOST_TRIALS` times, if it would be the best at its
# estimated cost divided by `_HOPE`. Estimates are far off until a program with as many rows was timed.
_FEW_TIMES, _MOST_TRIALS = 2, 4
_HOPE, _HOPE_AT_FIRST = 1.5, 4.0
# Weight of a new measurement in the average cost of rounds without drafts.
_NEW = 0.1
# Share of time for probing whether drafts would be accepted by now.
_PROBING = 0.02
# Before it drafts again, a drafter catches up on tokens that it missed, which takes about as long as so many drafts.
_CATCH_UP_DRAFTS = 8
# Steps of a launch without drafts.
_PLAIN_STEPS = 16


class _Best(NamedTuple):
    """The number of drafts with the most tokens per second."""

    num_drafts: int  # 0: there is no program
    gain: float  # ratio of its tokens per second to those of plain decoding


class CostController:
    """Controller that chooses by measured costs of launches and measured acceptance of drafts.

    Where plain decoding is best, a drafting round is probed now and then, because sequences and their acceptance
    change. If trees may be drafted, it chooses chains or trees, whichever gives more. A choice that was not made for
    long, plain decoding included, is probed too.

    Args:
        most: longest path of drafts, by number of tree nodes; 0 nodes: chains.
        drafts: prior share of rounds in which anything is drafted; 1: all rounds draft, always.
        accepted: prior share of drafts that are accepted, by number of tree nodes.
    """

    def __init__(
        self,
        num_seats: int,
        most: Mapping[int, int],
        costs: LaunchCosts,
        *,
        drafts: float = 1.0,
        accepted: Mapping[int, float],
    ) -> None:
        self.costs: LaunchCosts | None = costs
        self._costs = costs
        self.acceptance = {
            nodes: Acceptance(num_seats, most_drafts, drafts=drafts, accepted=accepted[nodes])
            for nodes, most_drafts in most.items()
        }
        self.most = dict(most)
        self._always_drafts = drafts == 1.0
        # Seconds of launches since the last with trees of so many nodes, with chains (0) and without drafts (None).
        self._seconds_without: dict[int | None, float] = dict.fromkeys([*most, None], 0.0)
        self._num_trials: Counter[Key] = Counter()
        self._without_drafts = 1.0  # cost of a round in which nothing is drafted, in plain steps

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        rows = len(seats)
        forecasts = {nodes: known.forecast(seats) for nodes, known in self.acceptance.items()}
        found = {nodes: self._best(nodes, forecast, rows, pages_per_row) for nodes, forecast in forecasts.items()}
        trial = self._untimed(forecasts, max(best.gain for best in found.values()), rows, pages_per_row)
        if trial is not None:
            return trial
        nodes = max(found, key=lambda nodes: found[nodes].gain)
        if found[nodes].gain < _MARGIN:
            nodes = None
        is_trial = False
        for other in (None, *found):
            if other != nodes and self._may_probe(other, found, rows, pages_per_row):
                nodes, is_trial = other, True
                break
        self._seconds_without[nodes] = 0.0
        if nodes is None:
            return Choice(np.zeros(rows, int), is_trial=is_trial)
        return Choice(np.full(rows, found[nodes].num_drafts), nodes, is_trial)

    def would_draft(self, rows: int, pages_per_row: int) -> bool:
        return any(
            self._best(nodes, known.forecast_of_unknown(rows), rows, pages_per_row).gain >= _MARGIN
            for nodes, known in self.acceptance.items()
        )

    def enter(self, seat: int) -> None:
        for known in self.acceptance.values():
            known.enter(seat)

    def observe(self, report: RoundsReport) -> None:
        self.acceptance[report.num_nodes].observe(report)

    def timed(self, launch: TimedLaunch) -> None:
        plain = self._costs.seconds(launch.rows, launch.pages_per_row, 0) or 0.0
        ran = launch.num_nodes if launch.num_drafts else None
        for nodes in self._seconds_without:
            if nodes != ran:
                self._seconds_without[nodes] += launch.seconds
        if not launch.num_drafts:
            each, rounds = launch.seconds / launch.rounds, launch.rounds
            self._costs.observe(launch.rows, launch.pages_per_row, 0, each, rounds=rounds)
        elif launch.rounds == launch.rounds_without:
            ratio = min(launch.seconds / (launch.rounds * plain), 2.0)
            self._without_drafts += _NEW * (max(ratio, 1.0) - self._without_drafts)
        else:
            seconds = launch.seconds - launch.rounds_without * plain * self._without_drafts
            rounds = launch.rounds - launch.rounds_without
            self._costs.observe(
                launch.rows, launch.pages_per_row, launch.num_drafts, max(seconds / rounds, plain), launch.num_nodes,
                rounds=rounds,
            )  # fmt: skip

    def _best(self, nodes: int, forecast: Forecast, rows: int, pages_per_row: int) -> _Best:
        """Return the number of drafts, at least 1, with the most tokens per second."""
        best = _Best(0, 0.0)
        for number in range(1, self.most[nodes] + 1):
            found = self._gain(nodes, number, forecast, rows, pages_per_row)
            if found > best.gain:
                best = _Best(number, found)
        return best

    def _gain(self, nodes: int, number: int, forecast: Forecast, rows: int, pages_per_row: int) -> float:
        """Return the ratio of tokens per second with so many drafts to plain decoding; 0: there is no program."""
        plain, seconds = (self._costs.seconds(rows, pages_per_row, *drafts) for drafts in ((0,), (number, nodes)))
        assert plain is not None
        if seconds is None:
            return 0.0
        if not self._always_drafts:
            without = plain * self._without_drafts
            seconds = without + forecast.any_drafts * max(0.0, seconds - without)
        return float(forecast.tokens[number]) / seconds * plain / rows

    def _untimed(self, forecasts: Mapping[int, Forecast], best: float, rows: int, pages_per_row: int) -> Choice | None:
        """Return a trial of a program that was not timed enough for such a batch, and may beat the best; or None.

        It is timed with the most drafts that it may have, then with the fewest, to tell the cost of drafts from the
        cost of verification.
        """
        plain = self._costs.program(rows, pages_per_row, 0)
        programs: dict[Key | None, list[tuple[int, int]]] = {plain: [(0, 0)]}
        gains: dict[Key | None, float] = {plain: 1.0}
        for nodes, forecast in forecasts.items():
            for number in range(self.most[nodes], 0, -1):
                program = self._costs.program(rows, pages_per_row, number, nodes)
                gain = self._gain(nodes, number, forecast, rows, pages_per_row)
                programs.setdefault(program, []).append((nodes, number))
                if forecast.tokens[number] >= _MARGIN * rows:  # otherwise it would not pay even if drafts were free
                    gains[program] = max(gains.get(program, 0.0), gain)
        is_first = not any(program and self._costs.num_measured(program) for program in programs if program != plain)
        hope = _HOPE_AT_FIRST if is_first else _HOPE
        hopeful = {program for program, gain in gains.items() if hope * gain >= max(best, 1.0) or program == plain}
        for program, drafts in programs.items():
            if program is None:
                continue
            times = self._costs.num_measured(program)
            # A single launch decides nothing: something else may have kept the machine busy.
            if program not in hopeful and not (times == 1 and program in gains):
                continue
            if times < _FEW_TIMES and self._num_trials[program] < _MOST_TRIALS:
                self._num_trials[program] += 1
                nodes, number = drafts[-1 if times % 2 else 0]
                return Choice(np.full(rows, number), nodes)
        return None

    def _may_probe(self, nodes: int | None, found: Mapping[int, _Best], rows: int, pages_per_row: int) -> bool:
        """Whether enough time went into other launches to pay for a probe of this kind and its catching up."""
        plain = self._costs.seconds(rows, pages_per_row, 0)
        assert plain is not None
        if nodes is None:
            return _PROBING * self._seconds_without[None] > _PLAIN_STEPS * plain
        best = found[nodes]
        program = self._costs.program(rows, pages_per_row, best.num_drafts, nodes) if best.num_drafts else None
        if program is None or not self._costs.num_measured(program):
            return False  # a probe must not cause a compile
        one = self._costs.seconds(rows, pages_per_row, best.num_drafts, nodes)
        assert one is not None
        needed = one + _CATCH_UP_DRAFTS * max(one - plain, 0.0) / best.num_drafts
        return _PROBING * self._seconds_without[nodes] > needed
