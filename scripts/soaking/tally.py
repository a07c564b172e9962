"""What has come of all requests of a soak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_FAILURES = 50


@dataclass
class Tally:
    """Counts of outcomes by the manner of clients, and what was not allowed.

    Attributes:
        statuses: of responses.
        compared: answers that were compared, by the path of the endpoint, and whether "streamed" or "whole".
        ties: near ties, each with its request.
        num_failed: outcomes that were not allowed; `failures` has the first ones.
        max_gap: longest time between two events of a stream, in seconds.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    compared: Counter[tuple[str, str]] = field(default_factory=Counter)
    ties: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    num_failed: int = 0

    @property
    def num_requests(self) -> int:
        return self.outcomes.total()

    def note(self, manner: str, outcome: str) -> None:
        """Count an outcome that is allowed."""
        self.outcomes[manner, outcome] += 1

    def fail(self, manner: str, reason: str, **details: Any) -> None:
        """Count an outcome that is not allowed."""
        self.outcomes[manner, "FAILED"] += 1
        self.num_failed += 1
        if len(self.failures) < _MOST_FAILURES:
            self.failures.append({"manner": manner, "reason": reason[:2000], **details})

    def as_json(self) -> Mapping[str, Any]:
        outcomes: dict[str, dict[str, int]] = {}
        for (manner, outcome), count in sorted(self.outcomes.items()):
            outcomes.setdefault(manner, {})[outcome] = count
        return {
            "num_requests": self.num_requests, "num_failed": self.num_failed, "outcomes": outcomes,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "compared": {f"{path} {form}": count for (path, form), count in sorted(self.compared.items())},
            "near_ties": dict(self.ties), "failures": self.failures,
        }  # fmt: skip
