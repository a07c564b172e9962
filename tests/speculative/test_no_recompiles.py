"""After warm-up nothing compiles, whatever is speculated; random requests get plain tokens and leak nothing."""

import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.scheduling.request import Request
from tests.builders import model_config, random_model
from tests.random_requests import random_request
from tests.speculative.builders import NUM_DRAFTS, AnyGamma, disturbed, speculating_engine, speculation_of

REQUESTS = 200


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module", params=["draft_model", pytest.param("ngram", marks=pytest.mark.slow)])
def warm(model, request) -> EngineCore:
    """An engine that has measured its launches, and for which any further compile is an error."""
    drafter = disturbed(model, 0.05) if request.param == "draft_model" else None
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    core = speculating_engine(model, drafter, speculative={"adaptive": "cost"}, strict_compiles=True, **few)
    assert core.warm_up(progress=False) == core.metrics.num_compiles_total
    return core


def serve(core: EngineCore) -> list[Request]:
    """Random requests that arrive while others run."""
    rng = np.random.default_rng(0)
    requests = [random_request(rng, number) for number in range(REQUESTS)]
    waiting = requests[::-1]
    while waiting or core.has_unfinished_requests():
        while waiting and len(core.scheduler.waiting) < 4 and rng.random() < 0.7:
            core.add_request(waiting.pop())
        core.step()
    core.check_integrity()
    return requests


def test_random_requests_get_plain_tokens_compile_nothing_and_leak_no_page(warm, idle_engine):
    strategy, compiled = speculation_of(warm), warm.metrics.num_compiles_total
    warm.check_integrity()
    costs = strategy.controller.costs
    assert costs is not None and warm.scheduler.kv.allocator.num_held == 0
    seconds = [costs.seconds(1, 1, number) for number in range(NUM_DRAFTS + 1)]
    assert all(one is not None and 0 < one < 10 for one in seconds), "warm-up measures what launches cost"
    # Whatever was measured: every number of drafts takes part.
    strategy.controller = AnyGamma(NUM_DRAFTS, seed=2)
    ours, theirs = serve(warm), serve(idle_engine())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.output_token_ids == other.output_token_ids, mine.sampling_params
        assert (mine.status, mine.stop_reason) == (other.status, other.stop_reason)
        assert len(mine.logprobs) == len(other.logprobs)
    assert warm.metrics.num_compiles_total == compiled
    assert warm.scheduler.kv.allocator.num_held == 0
    assert warm.metrics.spec_decode_num_drafts > 0
