"""Comparisons of two checkouts by turns, on one checkout that takes all sides."""

import subprocess
from pathlib import Path

import pytest

import bench_host_turns
import bench_throughput_turns
from cpu_bench.turns import Side, parser_of, ratios

ROOT = Path(__file__).parents[2]


def test_ratios_are_quartiles_of_one_side_over_another():
    with subprocess.Popen(["true"], text=True) as process:
        above, below = (
            Side("", process, [{"host": host} for host in times]) for times in ((3.0, 4.0, 2.0), (1.0, 2.0, 1.0))
        )
    assert ratios(above, below, "host") == [2.0, 2.0, 2.5]


def test_a_single_turn_is_refused(capsys):
    assert parser_of(None, turns=5).parse_args(["."]).turns == 5
    with pytest.raises(SystemExit):
        parser_of(None, turns=5).parse_args([".", "--turns", "1"])
    assert "there must be at least 2" in capsys.readouterr().err


def test_every_side_measures_every_number_of_requests_by_part():
    found = bench_host_turns.compare(ROOT, 1, [2, 3], steps=3, turns=2)
    assert list(found) == ["2", "3"]
    for row in found.values():
        assert list(row["milliseconds"]) == ["this", "other", "this again"]
        for parts in row["milliseconds"].values():
            assert set(parts) == {"scheduler", "batch building", "results", "host", "launch"}
            assert 0 < parts["scheduler"] < parts["host"]
        assert row["other_over_this"][1] > 0 and row["this_again_over_this"][1] > 0


@pytest.mark.slow
def test_throughput_of_both_checkouts_is_compared_with_its_spread():
    found = bench_throughput_turns.compare(ROOT, None, num_requests=2, longest=10, turns=2)
    assert list(found[bench_throughput_turns.RATE]) == ["this", "other", "this again"]
    assert all(rate > 0 for rate in found[bench_throughput_turns.RATE].values())
    assert found["this_over_other"][1] > 0 and found["this_again_over_this"][1] > 0


def test_a_checkout_without_the_benchmark_is_an_error(tmp_path):
    side = Side.start("an empty one", tmp_path, "host_time_worker.py", 1, 3, 2)
    with pytest.raises(RuntimeError, match="the process of an empty one has ended with 1"):
        side.measure(2)
    side.stop()
