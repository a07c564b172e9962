"""After warm-up nothing compiles, whatever requests ask for; and a thousand of them leak nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.core import CompileAfterWarmUpError
from tests.builders import make_engine, make_request, model_config, random_model
from tests.random_requests import random_request


@pytest.fixture(scope="module")
def warm():
    """An engine whose programs are all compiled, and for which any further compile is an error."""
    core = make_engine(random_model(model_config()), strict_compiles=True, kv_cache_tokens=256)
    count = core.warm_up(progress=False)
    assert count == core.metrics.num_compiles_total
    return core


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
    assert (warm.metrics.num_compiles_total, warm.metrics.num_compiles_after_warm_up_total) == (compiled, 0)
    assert warm.get_metrics().num_preemptions_total > 0, "the pool was never too small for the load"


def test_a_compile_after_warm_up_is_an_error_under_the_strict_flag():
    core = make_engine(random_model(model_config()), strict_compiles=True)
    core.compiles.is_warm = True  # nothing was compiled
    core.add_request(make_request("0", [1, 2, 3]))
    with pytest.raises(CompileAfterWarmUpError, match="decodes|prompt tokens"):
        core.step()
    assert core.metrics.num_compiles_after_warm_up_total == 1


def test_what_xla_compiles_outside_of_programs_is_counted_too(monkeypatch):
    core = make_engine(random_model(model_config()))
    core.add_request(make_request("0", [1, 2, 3], max_tokens=2))
    core.compiles.is_warm = True
    launch = core.launcher.launch

    def with_an_operation(rounds) -> bool:
        jnp.zeros((3, 7919)) + 1  # noqa: B018
        return launch(rounds)

    core.step()
    before = core.metrics.num_compiles_after_warm_up_total
    assert before >= 1
    monkeypatch.setattr(core.launcher, "launch", with_an_operation)
    core.step()
    assert core.metrics.num_compiles_after_warm_up_total > before
