"""The comparison of the host's time in two checkouts, on one checkout that takes both sides."""

from pathlib import Path

import pytest

from bench_host_turns import Side, compare, ratios

ROOT = Path(__file__).parents[2]


def test_above_one_this_checkout_is_the_faster_one():
    this, other = ([{"host": host} for host in times] for times in ((1.0, 2.0, 1.0), (3.0, 4.0, 2.0)))
    assert ratios(this, other) == [2.0, 2.0, 2.5]


def test_every_side_measures_every_number_of_requests_by_part():
    found = compare(ROOT, 1, [2, 3], steps=3, turns=2)
    assert list(found) == ["2", "3"]
    for row in found.values():
        assert list(row["milliseconds"]) == ["this", "other", "this again"]
        for parts in row["milliseconds"].values():
            assert set(parts) == {"scheduler", "batch building", "results", "host", "launch"}
            assert 0 < parts["scheduler"] < parts["host"]
        assert row["other_over_this"][1] > 0 and row["this_again_over_this"][1] > 0


def test_a_checkout_without_the_benchmark_is_an_error(tmp_path):
    side = Side.start("an empty one", tmp_path, 1, 3, 2)
    with pytest.raises(RuntimeError, match="the process of an empty one has ended with 1"):
        side.measure(2)
    side.stop()
