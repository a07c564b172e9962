"""The benchmark of the host's time, with steps that give arbitrary tokens at once."""

import pytest

from bench_host_time import PARTS, Bench


@pytest.mark.parametrize("max_decode_steps", [1, 4])
def test_each_part_of_a_launch_takes_time(max_decode_steps):
    bench = Bench(
        max_num_seqs=2, steps=3, max_decode_steps=max_decode_steps, overlap=True, with_device=False, longest_prompt=32,
        repetition_penalty=1.1,
    )  # fmt: skip
    medians = bench.run(2, 3)
    assert all(medians[part] > 0 for part in PARTS) and medians["host"] < 1000
