"""Which branch decoded in which step, drawn."""

import pytest

from jaxinfer.skeleton.answer import PointOutput, SkeletonEvent, SkeletonMetrics, SkeletonOutput
from jaxinfer.skeleton.plan import parse_skeleton

pytest.importorskip("matplotlib", reason="charts need the group `train`")

from branching.timeline import draw_timeline, runs_of


def test_steps_that_follow_one_another_are_one_bar():
    assert runs_of([7, 3, 4, 4, 5, 9, 10]) == [(3, 3), (7, 1), (9, 2)]
    assert runs_of([]) == []


def test_a_timeline_is_a_picture(tmp_path):
    written = "[PLAN]\n1.<20><None>[-]Mend\n[END]"
    output = SkeletonOutput(
        "How?", written, parse_skeleton(written, 20), [PointOutput(1, "Mend", "Glue it.", [1, 2], "stop")],
        "1. Mend: Glue it.", SkeletonMetrics(1, 1, 0.5, 2, 2, 0.25),
    )  # fmt: skip
    events = [SkeletonEvent(None, written, 1, 1, True), SkeletonEvent(1, "Glue it.", 2, 3, True)]
    draw_timeline(output, events, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
