"""Decode rounds in a launch after a step of chunks: the same tokens, and pages are read once they are written."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.launcher import Launcher
from jaxinfer.scheduling.launch_plan import LaunchPlan
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import RowKind
from tests.branching.builders import alone, make_group, run_groups
from tests.builders import drain, make_engine, make_request, model_config, one_by_one, random_model, random_prompts
from tests.engine.fake_device import Beside, Simulation, expected_output
from tests.engine.test_bound_draws import BOUNDS
from tests.scheduling.test_scheduler_states import SchedulerLife
from tests.speculative.builders import engine_of

WAYS = ("loops", *(pytest.param(way, marks=pytest.mark.slow) for way in ("ngram", "chains")), "draft model", "trees")


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


# The scheduler


def test_rounds_go_on_beside_the_chunks_of_a_prompt():
    sim = Simulation(budget=8, max_decode_steps=4, beside=lambda most: most)
    first = sim.add(make_request("a", prompt(5), max_tokens=40))
    sim.step()
    second = sim.add(make_request("b", prompt(16, 50), max_tokens=9))
    output = sim.launch()
    assert output.then is not None
    assert (output.num_scheduled_tokens, output.rounds_of) == ({"b": 7}, [])
    assert (output.then.num_scheduled_tokens, output.then.rounds_of) == ({"a": 1}, [4])
    output = sim.launch()
    assert output.then is not None and list(output.then.num_scheduled_tokens) == ["a"]
    output = sim.launch()
    assert output.num_scheduled_tokens == {"b": 2} and output.samples == [True]
    assert output.then is not None, "its last chunk is in the step: it takes part in the rounds"
    assert (list(output.then.num_scheduled_tokens), output.then.most_tokens) == (["a", "b"], [4, 4])
    assert not output.then.first_scheduled and not output.then.enters
    sim.drain()
    for request, tokens in ((first, 40), (second, 9)):
        assert request.output_token_ids == expected_output(request.prompt_token_ids, tokens)


def test_a_prompt_that_is_cached_whole_takes_part_in_the_rounds():
    sim = Simulation(budget=8, max_decode_steps=4, caching=True, beside=lambda most: most)
    sim.add(make_request("a", prompt(8), max_tokens=1))
    sim.drain()
    sim.add(make_request("c", prompt(9), max_tokens=9))
    sim.add(make_request("b", prompt(20, 50), max_tokens=1))
    output = sim.launch()
    assert output.then is not None and output.then.enters == {"c"} == output.then.first_scheduled
    assert (output.num_scheduled_tokens, output.then.rounds_of) == ({"b": 7}, [4])
    sim.drain()


@pytest.mark.parametrize(
    ("params", "most"),
    [({"max_tokens": 1}, None), ({"bad_token_ids": [(1, 2)]}, 4), ({"logprobs": 1}, 4), ({"max_tokens": 3}, 2)],
    ids=["it has ended", "it has a guard", "it has lists", "it ends soon"],
)
def test_of_a_row_that_comes_to_its_seat_as_many_tokens_may_land_as_it_may_draw(params, most):
    sim = Simulation(budget=8, max_decode_steps=4, beside=lambda most: most)
    sim.add(make_request("a", prompt(3), max_tokens=40))
    sim.step()
    sim.add(make_request("b", prompt(6, 50), **{"max_tokens": 9, **params}))
    output = sim.launch()
    assert output.then is not None and output.then.rounds_of[0] == 4
    found = dict(zip(output.then.num_scheduled_tokens, output.then.most_tokens, strict=True))
    assert found == {"a": 4} if most is None else {"a": 4, "b": most}
    sim.drain()


def test_without_pages_for_rounds_there_is_one_step_for_all():
    sim = Simulation(num_pages=5, budget=16, max_decode_steps=8, beside=lambda most: most)
    sim.add(make_request("a", prompt(7), max_tokens=12))
    sim.step()
    sim.add(make_request("b", prompt(12, 50), max_tokens=1))
    assert sim.launch().then is None
    sim.drain()


def rounds_first(in_order):
    return lambda self, output: in_order(self, output)[::-1]


def the_sampled_token_is_not_known(split):
    def planted(self, num_in_chunks):
        chunks, seated = split(self, num_in_chunks)
        for index, request in enumerate(seated.requests):
            if request in chunks.requests:
                seated.known[index] -= 1
        return chunks, seated

    return planted


def everybody_comes_again(split):
    def planted(self, num_in_chunks):
        chunks, seated = split(self, num_in_chunks)
        seated.enters |= {request.request_id for request in seated.requests if request in chunks.requests}
        return chunks, seated

    return planted


@pytest.mark.parametrize(
    ("where", "name", "plant"),
    [
        (Simulation, "in_order", rounds_first),
        (LaunchPlan, "split", the_sampled_token_is_not_known),
        (LaunchPlan, "split", everybody_comes_again),
    ],
)
def test_a_planted_bug_is_found(where, name, plant, monkeypatch):
    monkeypatch.setattr(where, name, plant(getattr(where, name)))
    few = settings(max_examples=1600, stateful_step_count=40, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(Exception) as found:
        run_state_machine_as_test(SchedulerLife, settings=few)
    assert not isinstance(found.value, TypeError | AttributeError | NameError), "the planted piece itself is broken"


# The engine


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module")
def single(model) -> EngineCore:
    return make_engine(model, max_num_seqs=1, max_decode_steps=1, enable_prefix_caching=False)


SHARED = random_prompts([9], seed=8)[0]


def requests(max_tokens: int = 14) -> list[Request]:
    """One of each kind, with prompts of several chunks: some share a prefix, one is a prefix of another."""
    prompts = [
        [*SHARED, *tokens] for tokens in random_prompts([30, 3, 50, 7, 41, 1, 20, 33, 2, 12], vocab_size=101, seed=9)
    ]
    prompts[3] = prompts[2][:40]
    return [
        make_request(name, tokens, max_tokens=max_tokens, **params)
        for tokens, (name, params) in zip(prompts, BOUNDS.items(), strict=True)
    ]


@pytest.fixture(scope="module")
def expected(single) -> dict[str, list[int]]:
    return dict(zip(BOUNDS, one_by_one(single, requests()), strict=True))


@pytest.fixture(scope="module")
def engines(model):
    made: dict[str, EngineCore] = {}

    def get(way: str) -> EngineCore:
        if way not in made:
            core = made[way] = engine_of(way, model, max_num_batched_tokens=16, kv_cache_tokens=320)
            core.scheduler.pace = Beside()
        assert made[way].reset_prefix_cache()
        return made[way]

    return get


@pytest.fixture
def pairs(monkeypatch) -> list[set[RowKind]]:
    """The kinds of rows that run after steps of chunks."""
    found = []
    launch = Launcher._launch

    def noted(self, output, begin):
        launch(self, output, begin)
        if output.then is not None:
            found.append(set(output.then.kinds))

    monkeypatch.setattr(Launcher, "_launch", noted)
    return found


def serve(core: EngineCore, arriving: list[Request]) -> dict[str, list[int]]:
    """Their tokens, where one arrives in every step."""
    waiting = arriving[::-1]
    while waiting or core.has_unfinished_requests():
        if waiting:
            core.add_request(waiting.pop())
        core.step()
        core.check_integrity()
    return {request.request_id: request.output_token_ids for request in arriving}


@pytest.mark.parametrize("way", WAYS)
def test_requests_that_arrive_while_others_run_get_their_tokens(way, engines, expected, pairs):
    core = engines(way)
    assert serve(core, requests()) == expected
    assert serve(core, requests()[::-1]) == expected, "with what is cached"
    kinds = set().union(*pairs)
    assert len(pairs) > 5 and (RowKind.DECODE if way == "loops" else RowKind.VERIFICATION) in kinds


@pytest.mark.parametrize(
    ("mode", "way"), [("in_one_sequence", "loops"), ("batching", "loops"), ("in_one_sequence", "draft model")]
)
def test_branches_go_on_beside_chunks(mode, way, engines, single, pairs):
    core = engines(way)
    prefix, long = random_prompts([30, 60], seed=4)
    each = [{"max_tokens": 20, "temperature": 0.9}] * 2
    group = make_group("g", prefix, [[3], [4, 5]], branch_mode=mode, each=each)
    beside = [make_request(str(i), long[i:], max_tokens=6) for i in range(2)]
    got = run_groups(core, [group], beside)
    others = [make_request(str(i), long[i:], max_tokens=6) for i in range(2)]
    assert got == one_by_one(single, [*alone("g", prefix, [[3], [4, 5]], each=each), *others])
    assert pairs


def test_the_tokens_of_the_step_are_read_before_those_of_the_rounds(engines):
    core = engines("loops")
    first, second = (make_request(name, SHARED[at:], max_tokens=30) for at, name in enumerate("ab"))
    core.add_request(first)
    core.step()
    core.step()
    core.add_request(second)
    landed = []
    while not second.num_output_tokens:
        landed = core.step()
    assert second.num_output_tokens == 1 and core.launcher.num_in_flight == 1
    assert [landing.request for landing in landed][-1] is second
    drain(core)
