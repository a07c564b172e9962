"""Measures the host's time in the checkout that it is started in, as often as it is asked to.

A line of the input is a number of running requests; a line of the output is its median milliseconds by part, as JSON.
Imports nothing beside it: the checkout may be an older one.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path


def main(max_decode_steps: int, steps: int, most: int) -> None:
    sys.path[:0] = [str(Path.cwd()), str(Path.cwd() / "scripts")]
    bench_of = importlib.import_module("bench_host_time").Bench
    options = {
        "max_num_seqs": most, "steps": steps, "max_decode_steps": max_decode_steps, "overlap": True,
        "with_device": False, "longest_prompt": 32, "repetition_penalty": 1.0,
    }  # fmt: skip
    known = inspect.signature(bench_of).parameters
    bench = bench_of(**{name: value for name, value in options.items() if name in known})
    for line in sys.stdin:
        print(json.dumps(bench.run(int(line), steps)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
