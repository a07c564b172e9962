"""Branches that speculate give the tokens of plain decoding, and a drafter that is the target is never wrong."""

from __future__ import annotations

import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.limits import BRANCH_MODES
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import RowKind
from jaxinfer.speculative.gamma import FixedGamma
from tests.branching.builders import alone, make_group, run_groups
from tests.builders import make_request, model_config, random_model, random_prompts, run_requests
from tests.speculative.builders import NUM_DRAFTS, AnyGamma, disturbed, speculating_engine, speculation_of

DRAFTERS = ("itself", pytest.param("disturbed", marks=pytest.mark.slow), "ngram")
LONG, SHORT = random_prompts([61, 22], seed=4)
IN_LANES = (RowKind.VERIFICATION, True)


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module")
def engines(model):
    """drafter -> an engine that speculates, with nothing cached."""
    made: dict[str, EngineCore] = {}
    drafters = {"itself": model, "disturbed": disturbed(model, 0.1), "ngram": None}

    def get(drafter: str, controller=None) -> EngineCore:
        if drafter not in made:
            made[drafter] = speculating_engine(model, drafters[drafter])
        core = made[drafter]
        speculation_of(core).controller = controller or FixedGamma(NUM_DRAFTS)
        assert not core.has_unfinished_requests() and core.reset_prefix_cache()
        return core

    return get


def group_of(make, prefix: list[int], **options):
    """Six branches, greedy and sampled, of many lengths, as a group or alone; some repeat themselves."""
    suffixes = [*random_prompts([3, 19, 0, 30], seed=9), [17, 4, 42, 8] * 5, [9, 8, 7] * 3]
    each = [
        {"max_tokens": 30},
        {"max_tokens": 24, "temperature": 0.5},
        {"max_tokens": 9, "temperature": 1.0},
        {"max_tokens": 28, "eos_token_ids": range(0, 100, 9)},
        {"max_tokens": 30, "temperature": 0.8, "top_k": 20},
        {"max_tokens": 1},
    ]
    return make(f"of {len(prefix)}", prefix, suffixes, seed=3, each=each, **options)


def others() -> list[Request]:
    prompts = [LONG[:30], *random_prompts([45], seed=2)]
    return [make_request(f"beside {i}", p, max_tokens=20, seed=i, temperature=i * 0.9) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(idle_engine_of_module) -> list[list[int]]:
    core = idle_engine_of_module
    return run_requests(core, [*group_of(alone, LONG), *group_of(alone, SHORT), *others()])


@pytest.fixture(scope="module")
def idle_engine_of_module(idle_engine) -> EngineCore:
    return idle_engine()


@pytest.mark.parametrize("mode", BRANCH_MODES)
@pytest.mark.parametrize("controller", [FixedGamma, AnyGamma])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_branches_get_the_tokens_of_plain_decoding(drafter, controller, mode, engines, expected, launches_of_rounds):
    """In a pool too small for all that run at once, with other requests and chunks of prompts between rounds."""
    core = engines(drafter, controller(NUM_DRAFTS))
    before = core.get_metrics()
    preemptions, drafts = before.num_preemptions_total, before.spec_decode_num_drafts
    groups = [group_of(make_group, prefix, branch_mode=mode) for prefix in (LONG, SHORT)]
    assert run_groups(core, groups, others()) == expected
    after = core.get_metrics()
    assert after.num_preemptions_total > preemptions and after.spec_decode_num_drafts > drafts
    assert (IN_LANES in launches_of_rounds) == (mode == "in_one_sequence")


def test_groups_of_both_modes_and_others_share_rounds(engines, expected, launches_of_rounds):
    core = engines("disturbed")
    groups = [
        group_of(make_group, prefix, branch_mode=mode, max_parallel=2)
        for prefix, mode in zip((LONG, SHORT), BRANCH_MODES, strict=True)
    ]
    assert run_groups(core, groups, others()) == expected
    assert IN_LANES in launches_of_rounds


def counts(requests: list[Request]) -> tuple[int, int]:
    """Drafted tokens that were rejected, and accepted ones."""
    drafted, accepted = (
        sum(getattr(request.metrics, name) for request in requests)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    return drafted - accepted, accepted


@pytest.mark.parametrize("mode", BRANCH_MODES)
@pytest.mark.parametrize("controller", [FixedGamma, AnyGamma])
def test_nothing_of_the_target_itself_is_rejected(controller, mode, engines, launches_of_rounds):
    """With chunks of prompts, preemption, and members that come late."""
    core = engines("itself", controller(NUM_DRAFTS))
    preemptions = core.get_metrics().num_preemptions_total
    groups = [
        group_of(make_group, prefix, branch_mode=mode, max_parallel=most) for prefix, most in ((LONG, None), (SHORT, 3))
    ]
    beside = others()
    run_groups(core, groups, beside)
    rejected, accepted = counts([*groups[0].members, *groups[1].members, *beside])
    assert rejected == 0 and accepted > 50
    assert core.get_metrics().num_preemptions_total > preemptions
    assert (IN_LANES in launches_of_rounds) == (mode == "in_one_sequence")


@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_nothing_is_rejected_behind_a_trunk_that_is_cached(mode, engines):
    core = engines("itself")
    run_groups(core, [make_group("first", LONG, [[1, 2], [3]], branch_mode=mode, max_tokens=8)])
    filled = speculation_of(core).lanes.filled.copy()
    assert filled.sum() >= len(LONG) // 4, "what the drafter computed of the trunk is not known"
    group = make_group("again", LONG, [[5, 6], [7], [8, 9, 1]], branch_mode=mode, max_tokens=20)
    run_groups(core, [group])
    rejected, accepted = counts(group.members)
    assert rejected == 0 and accepted > 30
    assert all(member.num_cached_tokens == 60 for member in group.members)


def test_log_probabilities_of_accepted_tokens_of_branches_are_those_of_each_alone(engines, idle_engine_of_module):
    core, suffixes = engines("itself"), random_prompts([3, 9])
    group = make_group("a", SHORT, suffixes, max_tokens=15, logprobs=3)
    same = alone("same", SHORT, suffixes, max_tokens=15, logprobs=3)
    assert run_groups(core, [group]) == run_requests(idle_engine_of_module, same)
    assert counts(group.members)[1] > 10
    for mine, other in zip(group.members, same, strict=True):
        assert len(mine.logprobs) == 15
        for found, wanted in zip(mine.logprobs, other.logprobs, strict=True):
            assert found.keys() == wanted.keys()
            assert [e.logprob for e in found.values()] == pytest.approx([e.logprob for e in wanted.values()], abs=1e-4)


@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_a_drafter_computes_a_trunk_once(mode, engines, monkeypatch):
    """Not once for each of the members that begin with it."""
    core = engines("itself")
    speculation = speculation_of(core)
    caught_up: list[int] = []
    launch = type(speculation)._launch_catch_up

    def recorded(self, found, batch, runner):
        left = launch(self, found, batch, runner)
        caught_up.append(sum(count for *_, count in found) - sum(count for *_, count in left))
        return left

    monkeypatch.setattr(type(speculation), "_launch_catch_up", recorded)
    group = make_group("a", SHORT, [[1], [2], [3], [4]], branch_mode=mode, max_tokens=20)
    run_groups(core, [group])
    rejected, accepted = counts(group.members)
    assert rejected == 0 and accepted > 30
    assert sum(caught_up) < len(SHORT)
