"""The contract of every way to decode: what a request gets depends on the request alone, and nothing compiles late."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from tests.builders import make_request, random_prompts
from tests.faults.trial import Answers, Trial
from tests.faults.ways import WAYS, Item

# Their pool holds all of their requests, or they are never preempted.
NOT_PREEMPTED = {"branched", "beam", "block", "bidirectional"}
NOT_CACHED = {"bidirectional"}
DRAFTING = {"ngram", "draft_model", "eagle3"}
WARM_WITH_SLOW = {"eagle3", "draft_model", "bidirectional"}  # their warm-up takes up to two minutes


@pytest.fixture(scope="class", params=WAYS)
def trial(request) -> Trial:
    """An engine that has compiled all of its programs, and its answers to requests that run beside each other."""
    core = WAYS[request.param].make()
    if request.param not in WARM_WITH_SLOW or request.config.getoption("--slow"):
        core.warm_up(progress=False)
    return Trial(WAYS[request.param], beside=True, core=core)


@functools.cache
def plain_answers() -> Answers:
    return Trial(WAYS["plain"], beside=True).expected


def bound_requests() -> list[Item]:
    """Requests whose draws are bound by what is kept with their seats."""
    first, second, third = random_prompts((12, 9, 15), seed=9)
    return [
        make_request("biased", first, max_tokens=9, logit_bias={5: 3.0, 6: -4.0}, bad_token_ids=[[7]], temperature=0.5),
        make_request("penalized", second, max_tokens=9, repetition_penalty=1.4, frequency_penalty=0.5),
        make_request("allowed", third, max_tokens=9, allowed_token_ids=range(1, 60), min_tokens=4, eos_token_ids=[3]),
    ]


def items_of(trial: Trial) -> list[Item]:
    return [item for items in trial.way.items(True).values() for item in items]


def merged(answers: Iterator[Answers]) -> Answers:
    return {name: answer for each in answers for name, answer in each.items()}


class TestContract:
    def test_requests_together_get_what_each_gets_alone(self, trial):
        assert merged(trial.run(items={0: [item]}) for item in items_of(trial)) == trial.expected

    def test_the_order_in_which_requests_come_changes_nothing(self, trial):
        assert trial.run(items={step: [item] for step, item in enumerate(items_of(trial)[::-1])}) == trial.expected

    def test_preempted_requests_get_the_same(self, trial):
        before = trial.core.get_metrics().num_preemptions_total
        assert trial.run(items={0: items_of(trial)}) == trial.expected
        happened = trial.core.get_metrics().num_preemptions_total > before
        assert happened == (trial.way.name not in NOT_PREEMPTED)

    def test_requests_whose_prompts_are_cached_get_the_same(self, trial):
        trial.run()
        before = trial.core.get_metrics().prefix_cache_hits
        assert trial.run(keeps_cache=True) == trial.expected
        assert (trial.core.get_metrics().prefix_cache_hits > before) == (trial.way.name not in NOT_CACHED)

    def test_streamed_requests_get_the_same_and_the_others_too(self, trial):
        items = items_of(trial)
        for item in items:
            for request in item.members if isinstance(item, RequestGroup) else [item]:
                if isinstance(request, Request):
                    request.stream = not request.stream
        assert trial.run(items={0: items}) == trial.expected

    def test_bound_requests_get_the_same_together_and_alone(self, trial):
        items = bound_requests()
        together = trial.run(items={0: [*items_of(trial), *items]})
        alone = merged(trial.run(items={0: [item]}) for item in bound_requests())
        assert {name: together[name] for name in alone} == alone

    def test_drafts_change_no_token(self, trial):
        if trial.way.name in DRAFTING:
            assert trial.expected == plain_answers()

    def test_nothing_is_compiled_after_warm_up(self, trial):
        trial.run()
        metrics = trial.core.get_metrics()
        if not trial.core.compiles.is_warm:
            pytest.skip("a long variant: run it with --slow")
        assert metrics.num_launches_total > 10 and metrics.num_compiles_after_warm_up_total == 0
