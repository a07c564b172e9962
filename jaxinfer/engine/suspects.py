"""Search for the request that makes steps fail: half of the suspects run alone, then half of these, until one fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from jaxinfer.outputs import EngineFailure
from jaxinfer.scheduling.group import Group
from jaxinfer.scheduling.request import Request, RequestStatus

logger = logging.getLogger(__name__)

# After a recovery the first token that lands comes from a recomputation: only the second one shows that a request runs
# from its seat as it did when the step failed.
_TOKENS_TO_CLEAR = 2


type Unit = Request | Group[Request]
"""A unit that runs or waits as one: a request, or the beams of one search, which wait for each other."""


def unit_of(request: Request) -> Unit:
    """Return the unit of a request."""
    return request.group if request.is_steered and request.group is not None else request


class Suspects:
    """Requests in whose launch a step failed. Each is cleared by two further tokens, or by its end.

    If a step fails again before all are cleared, half of them run alone while all other requests wait, until they
    are cleared or fail; then that half is halved. A unit that fails alone is the cause.
    """

    def __init__(self) -> None:
        self._needed: dict[Unit, int] = {}  # unit -> how many tokens it must have landed to be cleared
        self._alone: list[Unit] = []  # units of these that run alone; none: all requests run

    def failed(self, error: Exception, rows: Sequence[Request], requests: Mapping[str, Request]) -> bool:
        """Note a failed step; a unit that has failed alone ends with the error.

        Args:
            rows: requests of the launch that failed.
            requests: all that are registered, by id.

        Returns:
            Whether any request may be the cause.
        """
        by_unit = _by_unit(requests)
        failing = list(dict.fromkeys(unit for row in rows for unit in _units_of(row, by_unit)))
        if not failing:
            return False
        logger.error("a step has failed; what had not landed is computed again", exc_info=error)
        self.clear(requests)
        # A trunk counts as a row of all of its members, also if only one of them needs it now.
        failing = [unit for unit in failing if unit in self._alone] or failing
        known = [unit for unit in self._needed if unit in failing]
        if not known:
            self._suspect(failing, by_unit)
            return True
        if len(known) == 1 and failing == known:
            self._needed.pop(known[0])
            self._alone = []
            for request in by_unit[known[0]]:
                logger.error("request %s fails alone: it ends with the error", request.request_id)
                request.finish(RequestStatus.FINISHED_ERROR, error=EngineFailure(f"{type(error).__name__}: {error}"))
            return True
        self._suspect(known, by_unit)
        self._alone = known[: (len(known) + 1) // 2]
        return True

    def clear(self, requests: Mapping[str, Request]) -> bool:
        """Clear units that have landed enough tokens or have ended; return whether that lets all requests run again."""
        if not self._needed:
            return False
        by_unit = _by_unit(requests)
        self._needed = {
            unit: needed
            for unit, needed in self._needed.items()
            if unit in by_unit and _num_tokens(by_unit[unit]) < needed
        }
        if not self._alone or any(unit in self._needed for unit in self._alone):
            return False
        self._alone = []
        return True

    def only(self, requests: Mapping[str, Request]) -> frozenset[str] | None:
        """Return the ids of the requests that may run; None: all."""
        if not self._alone:
            return None
        return frozenset(name for name, request in requests.items() if unit_of(request) in self._alone)

    def _suspect(self, units: Sequence[Unit], by_unit: Mapping[Unit, list[Request]]) -> None:
        self._needed = {unit: _num_tokens(by_unit[unit]) + _TOKENS_TO_CLEAR for unit in units}


def _by_unit(requests: Mapping[str, Request]) -> dict[Unit, list[Request]]:
    found: dict[Unit, list[Request]] = {}
    for request in requests.values():
        if not request.is_finished:
            found.setdefault(unit_of(request), []).append(request)
    return found


def _units_of(row: Request, by_unit: Mapping[Unit, list[Request]]) -> list[Unit]:
    """Return the units of a row: its own or, for a trunk, those of all members that begin with it."""
    if row.is_trunk:
        return [unit for unit, requests in by_unit.items() if any(request.trunk is row for request in requests)]
    unit = unit_of(row)
    return [unit] if unit in by_unit else []


def _num_tokens(requests: Sequence[Request]) -> int:
    """Return how many output tokens a unit has landed: a search grows by one when its longest beams do."""
    return max(request.num_output_tokens for request in requests)
