"""What a step costs with how many sequences, as it was seen: whether one more of them pays."""

from __future__ import annotations

# How much of what is known a further launch takes the place of.
_NEW = 0.2


class BatchCosts:
    """Seconds of a decode step by the size of its program, of rows and of lanes.

    Both come in few sizes, so a sequence that needs the next larger program may cost more than it brings, until there
    are others that fill it.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], float] = {}

    def observe(self, size: int, seconds: float, *, lanes: bool) -> None:
        """A step of a program for `size` sequences took so long."""
        known = self._seconds.get((lanes, size))
        # One launch in which the machine was busy with something else must not count for much.
        seconds = seconds if known is None else known + _NEW * (min(seconds, 2 * known) - known)
        self._seconds[lanes, size] = seconds

    def pays(self, running: int, more: int, *, lanes: bool) -> bool:
        """Whether some number of up to `more` sequences beside those that run gives more tokens a second than none.

        What was never seen is worth a try.
        """
        sizes = sorted(size for of_lanes, size in self._seconds if of_lanes == lanes)

        def rate(sequences: int) -> float | None:
            size = next((size for size in sizes if size >= sequences), None)
            return None if size is None else sequences / self._seconds[lanes, size]

        now = rate(running)
        if now is None:
            return True
        for sequences in range(running + 1, running + more + 1):
            then = rate(sequences)
            if then is None or then > now:
                return True
        return False
