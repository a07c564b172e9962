"""A step that is interrupted or fails: what happens next begins from what has landed, and gives the same tokens."""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict

import jax
import pytest

from jaxinfer.engine.core import CompileAfterWarmUpError, StalledError
from jaxinfer.engine.launcher import Launcher
from jaxinfer.programs.program import KV, SEATS
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.scheduling.scheduler import Scheduler
from tests.branching.builders import make_group
from tests.builders import drain, make_engine, make_request, model_config, random_model, random_prompts, run_requests


class Boom(RuntimeError):
    pass


def once(error):
    """(function) -> the function, whose first call raises."""
    pending = [error]

    def wrap(function, *, after=False):
        def wrapped(*args, **kwargs):
            if not pending:
                return function(*args, **kwargs)
            if after:
                function(*args, **kwargs)
            raise pending.pop()

        return wrapped

    return wrap


def step_to_the_end(core) -> dict[str, list[int]]:
    """What landings tell of each request, with interruptions of steps passed over."""
    told = defaultdict(list)
    for _ in range(500):
        if not core.has_unfinished_requests():
            break
        try:
            landings = core.step()
        except KeyboardInterrupt:
            continue
        for request, first, last in landings:
            told[request.request_id] += request.token_ids[first:last]
    assert not core.has_unfinished_requests(), "unfinished after far too many steps"
    core.check_integrity()
    return told


@pytest.fixture
def two(idle_engine):
    """An engine, two requests, and the tokens that they get undisturbed."""
    core, prompts = idle_engine(), random_prompts((40, 23))

    def requests():
        return [
            make_request(name, prompt, max_tokens=24, seed=3, temperature=0.7)
            for name, prompt in zip("ab", prompts, strict=True)
        ]

    expected = dict(zip("ab", run_requests(core, requests()), strict=True))
    core.reset_prefix_cache()
    return core, requests, expected


def test_an_interrupted_launch_leaves_no_page_in_the_cache_that_was_never_computed(two, monkeypatch):
    """The most common moment in a notebook: while the first program compiles."""
    core, requests, expected = two
    first, second = requests()
    core.add_request(first)
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "launch", once(KeyboardInterrupt())(core.runner.launch))
        with pytest.raises(KeyboardInterrupt):
            core.step()
    core.abort("a")
    again = make_request("again", first.prompt_token_ids, max_tokens=24, seed=3, temperature=0.7)
    core.add_request(again)
    core.add_request(second)
    drain(core)
    assert again.num_cached_tokens == 0
    assert (again.output_token_ids, second.output_token_ids) == (expected["a"], expected["b"])


def test_a_launch_that_raises_harms_no_request_of_others(two, monkeypatch, caplog):
    core, requests, expected = two
    failures = core.metrics.num_step_failures_total
    for request in requests():
        core.add_request(request)
    for _ in range(3):
        core.step()
    monkeypatch.setattr(core.runner, "launch", once(Boom("no launch"))(core.runner.launch))
    assert step_to_the_end(core).keys() == {"a", "b"}
    assert core.metrics.num_step_failures_total == failures + 1 and "a step has failed" in caplog.text


def test_a_row_that_lands_nothing_although_it_was_sure_to_is_computed_again(two, monkeypatch, caplog):
    """It would wait for ever: what it has in flight is over, and nothing says why it has landed nothing."""
    core, requests, expected = two
    failures = core.metrics.num_step_failures_total
    made = requests()
    for request in made:
        core.add_request(request)
    while core.scheduler.requests["a"].num_output_tokens < 5:
        core.step()
    land, lost = Scheduler.update_from_output, []

    def lose_one(scheduler, output, sampled, *others):
        if not lost and output.requests[0].num_output_tokens:
            lost.append(output.requests[0])
            sampled = [[], *sampled[1:]]
        return land(scheduler, output, sampled, *others)

    monkeypatch.setattr(Scheduler, "update_from_output", lose_one)
    assert step_to_the_end(core).keys() == {"a", "b"}
    assert lost and {request.request_id: request.output_token_ids for request in made} == expected
    assert core.metrics.num_step_failures_total == failures + 1 and "was sure to land a token" in caplog.text


def test_an_interruption_while_tokens_land_loses_none(two, monkeypatch):
    core, requests, expected = two
    for request in requests():
        core.add_request(request)
    monkeypatch.setattr(KVCacheManager, "num_settled", once(KeyboardInterrupt())(KVCacheManager.num_settled))
    assert step_to_the_end(core) == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Boom("dropped")])
def test_state_that_was_given_to_a_launch_whose_results_are_lost_is_made_anew(error, two, monkeypatch):
    core, requests, expected = two
    for request in requests():
        core.add_request(request)
    for _ in range(2):
        core.step()
    executables = core.runner._executables
    losing = once(error)
    monkeypatch.setattr(
        core.runner, "_executables", {key: losing(found, after=True) for key, found in executables.items()}
    )
    landed = defaultdict(list)
    with contextlib.suppress(KeyboardInterrupt):
        for request, first, last in core.step():
            landed[request.request_id] += request.token_ids[first:last]
    monkeypatch.setattr(core.runner, "_executables", executables)
    told = step_to_the_end(core)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((core.runner.state[KV], core.runner.state[SEATS])))
    assert {name: request_tokens(core, expected, name, told, landed) for name in "ab"} == expected


def request_tokens(core, expected, name, told, landed):
    """Tokens that were reported before and after, following those that earlier steps reported."""
    tokens = landed[name] + told[name]
    return expected[name][: len(expected[name]) - len(tokens)] + tokens


def test_no_second_pool_is_alive_after_a_recovery(two, monkeypatch):
    core, requests, _ = two
    run_requests(core, requests()[:1])  # everything is compiled
    core.add_request(requests()[0])
    core.step()
    executables = core.runner._executables
    losing = once(KeyboardInterrupt())
    monkeypatch.setattr(
        core.runner, "_executables", {key: losing(found, after=True) for key, found in executables.items()}
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        core.step()
    monkeypatch.setattr(core.runner, "_executables", executables)
    drain(core)
    gc.collect()
    shape = core.kv.k[0].shape
    pools = [array for array in jax.live_arrays() if array.shape == shape]
    layers = core.model_config.num_layers
    assert caught.value is not None  # and its traceback, as in a notebook
    others = 2 * layers * (len(pools) // (2 * layers) - 1)
    assert len(pools) - others == 2 * layers


def test_what_had_ended_and_was_not_handed_out_is_a_landing_of_the_next_step(two, monkeypatch):
    core, requests, expected = two
    first, _ = requests()
    core.add_request(first)
    told: list[int] = []
    raised = False
    monkeypatch.setattr(Launcher, "land", after_the_end(Launcher.land, first))
    for _ in range(100):
        try:
            landings = core.step()
        except KeyboardInterrupt:
            raised = True
            assert first.is_finished and core.has_unfinished_requests()
            continue
        for request, begin, end in landings:
            told += request.token_ids[begin:end]
        if not core.has_unfinished_requests():
            break
    assert raised and told == expected["a"]


def after_the_end(land, request):
    pending = [True]

    def wrapped(self):
        land(self)
        if request.is_finished and pending:
            pending.pop()
            raise KeyboardInterrupt

    return wrapped


def test_one_of_eight_requests_for_which_every_launch_fails_ends_alone(idle_engine, monkeypatch, caplog):
    core = idle_engine()
    prompts = random_prompts([9] * 8, seed=6)

    def requests():
        return [make_request(f"r{i}", prompt, max_tokens=6) for i, prompt in enumerate(prompts)]

    expected = run_requests(core, requests())
    core.reset_prefix_cache()
    launch_step, launch_rounds = Launcher._launch_step, Launcher._launch_rounds

    def failing(launch):
        def wrapped(self, output, built):
            if any(request.request_id == "r5" for request in output.requests):
                raise Boom("r5 again")
            return launch(self, output, built)

        return wrapped

    monkeypatch.setattr(Launcher, "_launch_step", failing(launch_step))
    monkeypatch.setattr(Launcher, "_launch_rounds", failing(launch_rounds))
    again = requests()
    for request in again:
        core.add_request(request)
    ends = [landing for landing in iterate(core) if landing.request.request_id == "r5"]
    assert again[5].status is RequestStatus.FINISHED_ERROR and again[5].error == "Boom: r5 again"
    assert [(landing.first, landing.last) for landing in ends] == [(9, 9)]
    for index, request in enumerate(again):
        if index != 5:
            assert request.output_token_ids == expected[index] and request.status is RequestStatus.FINISHED_LENGTH
    assert "request r5 fails alone" in caplog.text
    core.check_integrity()
    monkeypatch.undo()
    core.reset_prefix_cache()
    assert run_requests(core, requests()) == expected


def iterate(core):
    for _ in range(500):
        if not core.has_unfinished_requests():
            return
        yield from core.step()
    raise AssertionError("unfinished after 500 steps")


def test_a_device_on_which_every_launch_fails_ends_all_requests_with_the_reason(idle_engine, monkeypatch):
    core = idle_engine()

    def fail(*args, **kwargs):
        raise Boom("the device is gone")

    monkeypatch.setattr(Launcher, "_launch_step", fail)
    monkeypatch.setattr(Launcher, "_launch_rounds", fail)
    requests = [make_request(str(i), prompt, max_tokens=4) for i, prompt in enumerate(random_prompts((5, 6, 7)))]
    group = make_group("g", [1, 2, 3, 4, 5], [[1], [2]], max_tokens=4)
    for request in requests:
        core.add_request(request)
    core.add_group(group)
    list(iterate(core))
    assert {request.error for request in (*requests, *group.members)} == {"Boom: the device is gone"}
    monkeypatch.undo()
    assert len(run_requests(core, [make_request("later", [1, 2, 3], max_tokens=4)])[0]) == 4


def test_an_interruption_that_a_library_has_wrapped_is_raised_as_one(two, monkeypatch):
    core, requests, _ = two
    core.add_request(requests()[0])
    error = ValueError("static arguments should be comparable: KeyboardInterrupt")
    monkeypatch.setattr(core.runner, "launch", once(error)(core.runner.launch))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    drain(core)


def test_a_compile_that_is_an_error_leaves_the_step_and_an_engine_that_goes_on():
    core = make_engine(random_model(model_config()), strict_compiles=True)
    core.compiles.is_warm = True
    core.add_request(make_request("a", [1, 2, 3], max_tokens=3))
    with pytest.raises(CompileAfterWarmUpError):
        core.step()
    core.compiles.is_warm = False
    drain(core)


# Progress


def test_a_step_that_can_do_nothing_for_unfinished_requests_says_so(idle_engine, monkeypatch):
    core = idle_engine()
    core.add_request(make_request("a", [1, 2, 3], max_tokens=3))
    scheduler = core.scheduler
    monkeypatch.setattr(type(scheduler), "_admit", lambda self, request, plan: False)
    with pytest.raises(StalledError, match="nothing is in flight: waiting: a; 64 of 64 pages available"):
        core.step()
    monkeypatch.undo()
    drain(core)


def test_a_paused_engine_waits_and_does_not_spin(idle_engine, monkeypatch):
    core = idle_engine()
    waited = []
    monkeypatch.setattr(core.transactions.notes, "wait", waited.append)
    request = make_request("a", [1, 2, 3], max_tokens=9)
    core.add_request(request)
    core.pause("weights are updated")
    for _ in range(3):
        assert core.step() == []
    assert len(waited) >= 2 and request.num_output_tokens == 0
    core.resume("weights are updated")
    drain(core)
    assert request.num_output_tokens == 9


def test_the_rest_of_a_group_runs_as_soon_as_others_have_ended(idle_engine):
    """Members are admitted as seats and pages allow, whatever had run beside them before."""
    core = idle_engine()
    others = [make_request(f"o{i}", [i, 1, 2], max_tokens=4) for i in range(2)]
    group = make_group("g", [5, 6, 7, 8, 9], [[i] for i in range(6)], max_tokens=40)
    for request in others:
        core.add_request(request)
    core.add_group(group)
    most = 0
    while core.has_unfinished_requests():
        core.step()
        most = max(most, group.num_running)
    assert most == 4


# Notes


def test_an_abort_by_the_garbage_collector_inside_a_step_waits_for_the_next_one(two, monkeypatch):
    core, requests, expected = two
    first, second = requests()
    core.add_request(first)
    core.add_request(second)
    find_prefix = KVCacheManager.find_prefix

    def collecting(self, request):
        if request is first and not first.is_finished:
            core.abort("a")  # what a stream that is collected does
            assert not first.is_finished
        find_prefix(self, request)

    monkeypatch.setattr(KVCacheManager, "find_prefix", collecting)
    told = step_to_the_end(core)
    assert first.status is RequestStatus.FINISHED_ABORTED and told["b"] == expected["b"]


def test_nothing_is_queued_where_one_of_several_is_refused(idle_engine):
    core = idle_engine()
    sound, long = make_request("sound", [1, 2], max_tokens=3), make_request("long", [1] * 100, max_tokens=61)
    with pytest.raises(ValueError, match="'long' may grow to 161 tokens"):
        core.add([sound, long])
    assert not core.has_unfinished_requests()
    with pytest.raises(ValueError, match="'sound' is in use"):
        core.add([sound, make_request("sound", [1], max_tokens=3)])
    assert not core.has_unfinished_requests()
