"""What launches of groups were."""

from __future__ import annotations

import pytest

from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.rounds import RowKind
from jaxinfer.engine.scheduler_output import SchedulerOutput


@pytest.fixture
def launches_of_rounds(monkeypatch) -> list[tuple[RowKind, bool]]:
    """Of every launch of rounds, what its rows did, and whether it read lanes of several branches."""
    launches: list[tuple[RowKind, bool]] = []
    build = InputBatch.build

    def recorded(self: InputBatch, output: SchedulerOutput) -> BuiltBatch:
        built = build(self, output)
        if output.num_rounds:
            launches.append((output.kinds[0], built.packed.shape.lane_pages > 0))
        return built

    monkeypatch.setattr(InputBatch, "build", recorded)
    return launches
