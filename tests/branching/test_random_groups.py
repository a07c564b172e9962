"""Random groups in a real engine: whatever runs at once, each sequence gets the tokens that it gets alone."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.limits import BRANCH_MODES
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from tests.branching.builders import make_group
from tests.builders import drain, make_request, run_requests

VOCAB = 101
# Settings of engines that other tests have compiled too.
ENGINES = {
    "cached": {},
    "not cached, crowded": {"enable_prefix_caching": False, "kv_cache_tokens": 160},
    "cached, crowded": {"kv_cache_tokens": 160},
}


def random_group(rng: np.random.Generator, name: str, prefixes: list[list[int]]) -> RequestGroup:
    """1 to 16 branches of which as many run at once as chance has it; they end by length or by a token that is
    likely to come."""
    count = int(rng.integers(1, 17))
    prefix = prefixes[rng.integers(len(prefixes))]
    prefix = prefix[: int(rng.integers(1, len(prefix) + 1))]
    suffixes = [rng.integers(0, VOCAB, int(rng.integers(0, 22))).tolist() for _ in range(count)]
    each = [
        {
            "max_tokens": int(rng.integers(1, 26)),
            "temperature": float(rng.choice([0.0, 0.9])),
            "eos_token_ids": rng.integers(0, VOCAB, int(rng.integers(0, 6))).tolist(),
            "stream": bool(rng.random() < 0.1),
        }
        for _ in range(count)
    ]
    return make_group(
        name, prefix, suffixes, branch_mode=str(rng.choice(BRANCH_MODES)), seed=int(rng.integers(1000)), each=each,
        max_parallel=int(rng.integers(1, count + 1)) if rng.random() < 0.6 else None,
        predicted=[one["max_tokens"] for one in each] if rng.random() < 0.5 else None,
    )  # fmt: skip


def alone(request: Request) -> Request:
    """Return a copy of the request that shares nothing with others."""
    return Request(
        f"{request.request_id} alone", request.prompt_token_ids, request.sampling_params, request.max_total_tokens,
        eos_token_ids=request.eos_token_ids, request_key=request.request_key,
    )  # fmt: skip


@pytest.mark.parametrize("limits", ENGINES)
def test_random_groups_give_the_tokens_of_each_sequence_alone(limits, idle_engine):
    core = idle_engine(**ENGINES[limits])
    before = core.get_metrics().num_preemptions_total
    rng = np.random.default_rng(sorted(ENGINES).index(limits))
    requests: list[Request] = []
    for number in range(7):
        prefixes = [rng.integers(0, VOCAB, length).tolist() for length in (70, 30)]
        # Some come while others run.
        for late in range(int(rng.integers(1, 4))):
            if rng.random() < 0.7:
                group = random_group(rng, f"{number} {late}", prefixes)
                core.add_group(group)
                requests += group.members
            else:
                prompt = prefixes[0][: int(rng.integers(1, 70))]
                request = make_request(f"{number} {late}", prompt, max_tokens=int(rng.integers(1, 40)), seed=number)
                core.add_request(request)
                requests.append(request)
            for _ in range(int(rng.integers(0, 6))):
                core.step()
                core.check_integrity()
        drain(core)
    expected = run_requests(idle_engine(), [alone(request) for request in requests])
    assert [request.output_token_ids for request in requests] == expected
    assert core.scheduler.kv.num_available == core.scheduler.kv.allocator.num_pages
    assert "crowded" not in limits or core.get_metrics().num_preemptions_total > before
