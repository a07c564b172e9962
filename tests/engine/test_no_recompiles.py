"""After warm-up nothing compiles, whatever requests ask for; and a thousand of them leave nothing behind."""

import numpy as np
import pytest

from jaxinfer.engine.core import CompileAfterWarmUpError
from jaxinfer.engine.request import Request
from jaxinfer.sampling_params import SamplingParams
from tests.builders import make_engine, make_request, model_config, random_model

VOCAB = 101


@pytest.fixture(scope="module")
def warm():
    """An engine whose programs are all compiled, and for which any further compile is an error."""
    core = make_engine(random_model(model_config()), strict_compiles=True, kv_cache_tokens=256)
    count = core.warm_up(progress=False)
    assert count == core.metrics.num_compiles_total
    return core


def random_request(rng: np.random.Generator, number: int) -> Request:
    """Any mixture of everything that a request can ask for."""

    def sometimes(value, otherwise):
        return value if rng.random() < 0.15 else otherwise

    tokens = lambda count: rng.integers(0, VOCAB, count).tolist()  # noqa: E731
    max_tokens = int(rng.integers(1, 12))
    params = SamplingParams(
        temperature=sometimes(0.0, float(rng.uniform(0.2, 2))),
        top_p=sometimes(float(rng.uniform(0.1, 1)), 1.0),
        top_k=sometimes(int(rng.integers(1, VOCAB)), 0),
        min_p=sometimes(float(rng.uniform(0, 0.5)), 0.0),
        seed=sometimes(number, None),
        presence_penalty=sometimes(1.0, 0.0),
        frequency_penalty=sometimes(0.5, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        logit_bias=sometimes(dict.fromkeys(tokens(5), 3.0), None),
        allowed_token_ids=sometimes(tokens(30), None),
        stop_token_ids=sometimes(tokens(3), None),
        ignore_eos=sometimes(True, False),
        min_tokens=sometimes(int(rng.integers(0, max_tokens + 1)), 0),
        max_tokens=max_tokens,
        logprobs=sometimes(int(rng.integers(0, 21)), None),
        prompt_logprobs=sometimes(int(rng.integers(0, 21)), None),
    )
    prompt = tokens(int(rng.integers(1, 80)))
    return Request(
        str(number), prompt, params, len(prompt) + max_tokens, eos_token_ids=frozenset((7,)),
        request_key=(number, 1), bad_token_ids=sometimes(((3,), (4, 5)), ()), stream=sometimes(True, False),
    )  # fmt: skip


def test_a_thousand_random_requests_compile_nothing_and_leak_no_page(warm):
    rng = np.random.default_rng(0)
    compiled, finished, number = warm.metrics.num_compiles_total, [], 0
    while number < 1000 or warm.has_unfinished_requests():
        while number < 1000 and len(warm.scheduler.waiting) < 4 and rng.random() < 0.7:
            finished.append(random_request(rng, number))
            warm.add_request(finished[-1])
            number += 1
        warm.step()
    warm.check_integrity()
    assert all(request.is_finished for request in finished)
    assert warm.scheduler.kv.allocator.num_held == 0
    assert len(warm.input_batch.free_seats) + len(warm.scheduler.finished_req_ids) == warm.config.max_num_seqs
    assert warm.metrics.num_compiles_total == compiled
    assert warm.get_metrics().num_preemptions_total > 0, "the pool was never too small for the load"


def test_a_compile_after_warm_up_is_an_error_under_the_strict_flag():
    core = make_engine(random_model(model_config()), strict_compiles=True)
    core.warm = True  # nothing was compiled
    core.add_request(make_request("0", [1, 2, 3]))
    with pytest.raises(CompileAfterWarmUpError, match="decodes|prompt tokens"):
        core.step()
    assert core.metrics.num_compiles_after_warm_up_total == 1
