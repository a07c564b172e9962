"""After warm-up nothing compiles, whatever is speculated; random requests get plain tokens and leave nothing behind."""

import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.request import Request
from tests.builders import model_config, random_model
from tests.random_requests import random_request
from tests.speculative.builders import NUM_DRAFTS, AnyGamma, disturbed, speculating_engine, speculation_of

REQUESTS = 400


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module", params=["draft_model", pytest.param("ngram", marks=pytest.mark.slow)])
def warm(model, request) -> EngineCore:
    """An engine that has measured its launches, and for which any further compile is an error."""
    drafter = disturbed(model, 0.05) if request.param == "draft_model" else None
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_tokens": 160}
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


def test_warm_up_measures_what_every_launch_costs(warm):
    strategy = speculation_of(warm)
    costs = strategy.controller.costs
    assert costs is not None
    for rows in (1, 2):
        seconds = [costs.seconds(rows, 1, number) for number in range(4)]
        assert all(one is not None and 0 < one < 10 for one in seconds)


def test_measuring_leaves_the_engine_as_it_was(warm):
    lanes = speculation_of(warm).lanes
    warm.strategy.measure(warm.runner, warm.scheduler.kv.allocator)
    warm.check_integrity()
    assert warm.scheduler.kv.allocator.num_held == 0
    assert not lanes.follows[list(warm.input_batch.free_seats)].any()


def test_random_requests_get_plain_tokens_compile_nothing_and_leak_no_page(warm, idle_engine):
    compiled = warm.metrics.num_compiles_total
    # Whatever was measured: every number of drafts takes part.
    speculation_of(warm).controller = AnyGamma(NUM_DRAFTS, seed=2)
    ours, theirs = serve(warm), serve(idle_engine())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.output_token_ids == other.output_token_ids, mine.sampling_params
        assert (mine.status, mine.stop_reason) == (other.status, other.stop_reason)
        assert len(mine.logprobs) == len(other.logprobs)
    assert warm.metrics.num_compiles_total == compiled
    assert warm.scheduler.kv.allocator.num_held == 0
    assert warm.metrics.spec_decode_num_drafts > 0 and warm.get_metrics().num_preemptions_total > 0
