"""Random clients against the server for a while; `make soak` is the same for twenty minutes."""

from __future__ import annotations

import pytest

from soaking.answers import READERS
from soaking.course import ENGINE, Course, run_course
from soaking.manners import MANNERS

# Few programs, so that all are compiled soon.
SMALL_ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_tokens": 1024}
DRAFTS = {"method": "draft_model", "model": "tiny-draft"}


@pytest.mark.parametrize(
    ("seconds", "engine", "speculative_config"),
    [(20.0, SMALL_ENGINE, {}), (60.0, ENGINE, DRAFTS)],
    ids=["20 seconds", "60 seconds"],
)
@pytest.mark.slow
def test_random_clients_get_what_they_are_allowed_to_and_leave_nothing(seconds, engine, speculative_config):
    course = Course(
        engine=engine, speculative_config=speculative_config, seconds=seconds, num_clients=10, num_distinct=40,
        warm_up_seconds=seconds / 2, seed=int(seconds),
    )  # fmt: skip
    findings, tally = run_course(course)
    assert findings.problems == [], tally.failures
    seen = {manner for manner, _ in tally.outcomes}
    assert len(seen) >= len(MANNERS) - 2 and tally.num_requests > 5 * seconds
    assert tally.compared.keys() == {(path, form) for path in READERS for form in ("streamed", "whole")}
    assert sum(count for (_, outcome), count in tally.outcomes.items() if outcome == "equal") > seconds
    assert tally.outcomes["stream when it ends", "equal"] + tally.outcomes["stream when it ends", "near tie"] == 4
