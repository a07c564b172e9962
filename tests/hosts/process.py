"""One of several processes that share a model: `python -m tests.hosts.process ADDRESS COUNT ID NAME OPTIONS`.

The first one prints a line of JSON for everything that it has to tell.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.errors import LostProcessError
from jaxinfer.hosts.following import follow
from jaxinfer.hosts.team import join
from tests.random_requests import random_request

LIMITS: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_tokens": 1024, "page_size": 8,
}  # fmt: skip


def build(options: dict[str, Any]) -> LLM:
    return LLM(tensor_parallel_size=2, **LIMITS, **options)


def tell(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def mixed(llm: LLM, count: int) -> list[list[list[int]]]:
    """Return the tokens of many requests of all kinds, some of which leave, with a step that fails on the way."""
    rng = np.random.default_rng(0)
    requests = [random_request(rng, number) for number in range(count)]
    prompts = [request.prompt_token_ids for request in requests]
    params = [request.sampling_params for request in requests]
    half = count // 2
    found = [
        [each.token_ids for each in output.outputs] for output in llm.generate(prompts[:half], params[:half], False)
    ]
    for output in llm.stream(["Once", "Who keeps the lighthouse?"], SamplingParams(max_tokens=60, ignore_eos=True)):
        if output.outputs[0].token_ids:
            break  # both are aborted
    fail_once(llm)
    found += [
        [each.token_ids for each in output.outputs] for output in llm.generate(prompts[half:], params[half:], False)
    ]
    assert llm.get_metrics().num_recoveries_total >= 1
    samples = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=20)
    found += [[each.token_ids for each in llm.generate("Tell me about a dog.", samples, False)[0].outputs]]
    suffixes = [" the keeper", " a boat", " the sea"]
    branches = llm.generate_branches("Write of", suffixes, SamplingParams(temperature=0.8, seed=1, max_tokens=20))
    return [*found, [each.token_ids for each in branches.outputs]]


def fail_once(llm: LLM) -> None:
    """Let one step fail, after it has launched and before its results are read."""
    launcher = llm.core.launcher
    land = launcher.land

    def failing() -> None:
        launcher.land = land
        raise OSError("planted")

    launcher.land = failing


def run_mixed(llm: LLM, count: int = 24) -> None:
    begin = time.perf_counter()
    tokens = mixed(llm, count)
    metrics = llm.get_metrics()
    llm.core.check_integrity()
    tell(
        tokens=tokens, seconds=time.perf_counter() - begin, launches=metrics.num_launches_total,
        accepted=metrics.spec_decode_num_accepted_tokens, recoveries=metrics.num_recoveries_total,
    )  # fmt: skip


def run_thousand(llm: LLM) -> None:
    run_mixed(llm, 1000)


def run_warm(llm: LLM) -> None:
    count = llm.warm_up(progress=False)
    run_mixed(llm)
    tell(programs=count, compiles=llm.get_metrics().num_compiles_after_warm_up_total)


def run_refused(llm: LLM) -> None:
    """Name what several processes cannot do."""
    refused = []
    for work in (llm.sleep, llm.weights_digest, lambda: llm.update_weights({})):
        try:
            work()
        except RuntimeError as error:
            refused.append(str(error))
    tell(refused=refused)


def run_lost(llm: LLM) -> None:
    """Decode until another process is lost."""
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    llm.generate(["Once"] * 4, params, False)  # programs compile
    tell(begins=True)
    try:
        while True:
            llm.generate(["Once"] * 4, params, False)
    except LostProcessError as error:
        tell(lost=str(error))
    try:
        llm.generate("Once", use_tqdm=False)
    except LostProcessError as error:
        tell(again=str(error))


SCENARIOS: dict[str, Callable[[LLM], None]] = {
    "mixed": run_mixed, "thousand": run_thousand, "warm": run_warm, "refused": run_refused, "lost": run_lost,
}  # fmt: skip


def main() -> None:
    address, count, process_id, name, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]
    team = join(address, count, process_id) if count > 1 else None
    llm = build(json.loads(options))
    if team is None or team.leads:
        SCENARIOS[name](llm)
    else:
        follow(llm.core)
        tell(followed=True)


if __name__ == "__main__":
    main()
