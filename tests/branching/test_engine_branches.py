"""Branches and samples in the engine: each gives the tokens that it gives alone, in either mode, whatever else runs."""

from __future__ import annotations

import pytest

from jaxinfer.limits import BRANCH_MODES
from tests.branching.builders import alone, make_group, run_groups
from tests.builders import drain, make_request, random_prompts, run_requests


def suffixes_of(count: int, seed: int = 1) -> list[list[int]]:
    return random_prompts([(5 * i + 3) % 17 for i in range(count)], seed=seed)


@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_only_one_sequence_reads_lanes(mode, idle_engine, launches_of_rounds):
    core, [prefix] = idle_engine(), random_prompts([41])
    run_groups(core, [make_group("a", prefix, suffixes_of(3), branch_mode=mode, max_tokens=40, stream=True)])
    run_groups(core, [make_group("b", prefix, suffixes_of(3), branch_mode=mode, max_tokens=40)])
    in_lanes = sum(lanes for _, lanes in launches_of_rounds)
    assert in_lanes > 5 if mode == "in_one_sequence" else not in_lanes


def test_metrics_count_sequences_and_no_trunks(idle_engine):
    core, [prefix] = idle_engine(), random_prompts([41])
    core.add_group(make_group("a", prefix, suffixes_of(5), max_parallel=2, max_tokens=90))
    core.add_request(make_request("other", prefix[:7], max_tokens=90))
    for _ in range(3):
        core.step()
    metrics = core.get_metrics()
    assert (metrics.num_requests_running, metrics.branch_count, metrics.num_requests_waiting) == (3, 2, 3)
    drain(core)
    metrics = core.get_metrics()
    assert (metrics.num_requests_running, metrics.branch_count, metrics.num_requests_waiting) == (0, 0, 0)


@pytest.mark.parametrize("mode", BRANCH_MODES)
@pytest.mark.parametrize("caching", [True, False])
def test_branches_give_the_tokens_of_each_alone(mode, caching, idle_engine):
    core = idle_engine(enable_prefix_caching=caching)
    for number, (length, count) in enumerate(((41, 6), (3, 3), (64, 1), (20, 9))):
        prefix, suffixes = random_prompts([length], seed=number)[0], suffixes_of(count)
        params = {"temperature": 0.8 * (number % 2), "seed": 5, "max_tokens": 20}
        got = run_groups(core, [make_group(f"{number}", prefix, suffixes, branch_mode=mode, **params)])
        assert got == run_requests(core, alone("same", prefix, suffixes, **params))


@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_groups_and_other_requests_share_launches_in_a_small_pool(mode, idle_engine):
    core = idle_engine(enable_prefix_caching=False, kv_cache_tokens=160)
    prefixes = random_prompts([40, 21, 70], seed=3)
    before = core.get_metrics().num_preemptions_total

    def parts(number: int) -> tuple:
        count = (5, 3, 4)[number]
        return prefixes[number], suffixes_of(count, seed=number)

    each = [{"max_tokens": 9 + 12 * i, "temperature": i % 2 * 0.9} for i in range(5)]
    groups = [make_group(f"{n}", *parts(n), branch_mode=mode, seed=n, each=each[: len(parts(n)[1])]) for n in range(3)]
    others = [make_request(f"other {i}", p, max_tokens=30) for i, p in enumerate(random_prompts([9, 50], seed=8))]
    got = run_groups(core, groups, others)
    expected = [
        run_requests(core, [request])[0]
        for n in range(3)
        for request in alone(f"{n}", *parts(n), seed=n, each=each[: len(parts(n)[1])])
    ]
    expected += run_requests(core, [make_request(r.request_id, r.prompt_token_ids, max_tokens=30) for r in others])
    assert got == expected
    assert core.get_metrics().num_preemptions_total > before


def test_log_probabilities_come_with_every_token_in_and_beside_lanes(idle_engine, launches_of_rounds):
    core, [prefix] = idle_engine(), random_prompts([41])

    def others() -> list:
        return [make_request("beside", prefix[:9], max_tokens=6, logprobs=2)]

    params = {"max_tokens": 12, "each": [{}, {"logprobs": 3, "max_tokens": 5}, {}]}
    group, beside = make_group("a", prefix, suffixes_of(3), **params), others()
    got = run_groups(core, [group], beside)
    assert any(lanes for _, lanes in launches_of_rounds)
    same = [*alone("same", prefix, suffixes_of(3), **params), *others()]
    assert got == run_requests(core, same)
    for mine, other in zip((*group.members, *beside), same, strict=True):
        wanted = mine.sampling_params.logprobs
        assert len(mine.logprobs) == (0 if wanted is None else mine.num_output_tokens)
        assert [list(entry) for entry in mine.logprobs] == [list(entry) for entry in other.logprobs]
