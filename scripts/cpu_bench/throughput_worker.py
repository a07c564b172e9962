"""Measures tokens per second in the checkout that it is started in, as often as it is asked to.

A line of the input is a number of requests; a line of the output is how many output tokens per second they had, as
JSON. Passes that compile are repeated. Imports nothing beside it: the checkout may be an older one.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main(longest: int, *model: str) -> None:
    sys.path.insert(0, str(Path.cwd()))
    jaxinfer = importlib.import_module("jaxinfer")
    workload = importlib.import_module("jaxinfer.bench.workload")
    run_workload = importlib.import_module("jaxinfer.bench.driver").run_workload
    llm = jaxinfer.LLM(*model)
    lengths = workload.LengthRange.parse(f"{max(longest // 10, 1)}:{longest}")
    for line in sys.stdin:
        items = workload.random_workload(
            num_requests=int(line),
            input_len=lengths,
            output_len=lengths,
            vocab_size=llm.model_config.vocab_size,
            seed=0,
        )
        params = [
            jaxinfer.SamplingParams(temperature=1.0, max_tokens=item.max_tokens, ignore_eos=True, seed=number)
            for number, item in enumerate(items)
        ]
        while True:
            num_compiled = llm.get_metrics().num_compiles_total
            llm.reset_prefix_cache()
            measured, _ = run_workload(llm, items, params)
            if llm.get_metrics().num_compiles_total == num_compiled:
                break
        print(json.dumps({"tokens per second": measured.output_tokens / measured.seconds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
