"""An engine without HTTP: for each line of stdin, "KIND COUNT TOKENS", it writes a line with seconds and tokens."""

from __future__ import annotations

import json
import sys
import time

from jaxinfer import LLM, SamplingParams
from server_bench.workload import ENGINE, messages, params


def main() -> None:
    llm = LLM(**ENGINE)
    llm.warm_up(use_tqdm=False)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, count, tokens = line.split()
        llm.reset_prefix_cache()
        given = [SamplingParams(**params(number, int(tokens))) for number in range(int(count))]
        prompts = [llm.client.inputs.render(messages(number), 0, {}) for number in range(int(count))]
        begin, total = time.perf_counter(), 0
        if kind == "whole":
            outputs = llm.generate(prompts, given, use_tqdm=False)
        else:
            items = llm.client.inputs.requests(prompts, given, stream=True)
            outputs = llm.client.outputs(items, _Silent(), stream=True)
        for output in outputs:
            total += len(output.outputs[0].token_ids)
        print(json.dumps({"seconds": time.perf_counter() - begin, "tokens": total}), flush=True)


class _Silent:
    """A watcher of compiles that shows nothing."""

    def compiling(self, program: str) -> None:
        pass

    def compiled(self) -> None:
        pass


if __name__ == "__main__":
    main()
