"""Constrained requests get the same tokens with the automaton on the device as when the host applies the constraint."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.constraints.automaton import RegularAutomaton
from jaxinfer.constraints.characters import Characters
from jaxinfer.constraints.regular import character, choice, literal, marker, repeat, sequence
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.engine import constraints as constraints_module
from jaxinfer.engine.constraints import DeviceConstraints
from jaxinfer.engine.core import EngineCore
from jaxinfer.sampling.constraint import AutomatonLimits
from jaxinfer.scheduling.request import Request
from jaxinfer.speculative import constrained, rounds
from jaxinfer.speculative.gamma import FixedGamma
from tests.builders import make_engine, make_request, model_config, random_model, random_prompts, run_requests
from tests.speculative.builders import NUM_DRAFTS, random_head, speculating_engine

pytestmark = pytest.mark.unoptimized

LETTERS = [bytes([byte]) for byte in range(ord("a"), ord("z") + 1)]
PAIRS = [first + second for first in LETTERS[:6] for second in LETTERS[:10]]
SIZE, MARKER, EOS = 101, 99, 100
VOCABULARY = Vocabulary([*LETTERS, *PAIRS], markers={"<m>": MARKER}, size=SIZE)
A_TO_R = Characters(((ord("a"), ord("r")),))
# Most letters; then a marker, three letters at most, and "no" or nothing.
EXPRESSION = sequence(
    repeat(character(A_TO_R), 9, 16), marker("<m>"), repeat(character(A_TO_R), 1, 3), choice(literal("no"), literal(""))
)
TREES = {"num_speculative_tokens": 12, "tree_depth": NUM_DRAFTS - 1, "tree_top_k": 4}
WAYS = ("loops", *(pytest.param(way, marks=pytest.mark.slow) for way in ("chains", "ngram")), "trees")


def automaton() -> RegularAutomaton:
    return RegularAutomaton(EXPRESSION, VOCABULARY, [EOS])


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module")
def plain(model) -> EngineCore:
    """The host holds requests to their automata, token by token."""
    return make_engine(model)


@pytest.fixture(scope="module")
def engines(model):
    made: dict[str, EngineCore] = {}

    def get(way: str) -> EngineCore:
        if way not in made:
            made[way] = make(way)
        return made[way]

    def make(way: str) -> EngineCore:
        if way == "loops":
            return make_engine(model, vocabulary=VOCABULARY)
        drafter = {"chains": model, "ngram": None, "trees": random_head(model.config)}[way]
        controller = FixedGamma(NUM_DRAFTS, TREES["num_speculative_tokens"] if way == "trees" else 0)
        fields = TREES if way == "trees" else None
        return speculating_engine(model, drafter, controller, speculative=fields, vocabulary=VOCABULARY)

    return get


def requests(*automata: RegularAutomaton, stream: bool = False) -> list[Request]:
    """Some that follow the automata in turn, greedy and sampled, and some that are free."""
    prompts = random_prompts((12, 30, 9, 5, 17, 22))
    made = []
    for number, prompt in enumerate(prompts):
        request = make_request(
            str(number), prompt, max_tokens=3 if number == 5 else 20, temperature=number % 3 * 0.7, seed=number,
            eos_token_ids=[EOS], stream=stream, logprobs=2 if number == 3 else None,
            constraint=None if number % 3 == 1 else automata[number % len(automata)],
            frequency_penalty=0.3 if number == 5 else 0,
        )  # fmt: skip
        made.append(request)
    return made


def is_followed(tokens: list[int], held: RegularAutomaton) -> bool:
    state: Any = held.start
    for token in tokens:
        state = held.advance(state, token)
        if state is None:
            return False
    return True


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_that_the_host_holds_requests_to(way, engines, plain):
    held = automaton()
    wanted = run_requests(plain, requests(held))
    assert run_requests(engines(way), requests(held)) == wanted
    assert all(is_followed(wanted[number], held) for number in (0, 2, 3))


def test_rounds_take_several_tokens_in_a_launch(engines, plain):
    held = automaton()
    launches = []
    for core in (plain, engines("loops"), engines("chains")):
        before = core.metrics.num_launches_total
        run_requests(core, requests(held)[:1])
        launches.append(core.metrics.num_launches_total - before)
    assert max(launches[1:]) <= launches[0] / 3


def test_drafts_are_accepted_along_the_automaton(model, plain):
    """A drafter that agrees with the target drafts its tokens, as long as the automaton allows its favourites."""
    everything = repeat(character(Characters(((ord("a"), ord("z")),))), 9, 200)
    free = RegularAutomaton(everything, VOCABULARY, [EOS])
    core = speculating_engine(model, model, FixedGamma(NUM_DRAFTS), vocabulary=VOCABULARY)
    run_requests(core, requests(free)[:1])
    metrics = core.metrics
    assert metrics.spec_decode_num_accepted_tokens > 0.5 * metrics.spec_decode_num_draft_tokens > 0


@pytest.mark.parametrize("way", ["loops", "trees"])
def test_streams_and_other_automata_are_held_as_well(way, engines, plain):
    """The device has one automaton at a time: the host constrains requests that bring another one meanwhile."""
    held, other = automaton(), RegularAutomaton(repeat(literal("ab"), 2, 9), VOCABULARY, [EOS])
    for automata, stream in (((held, other), False), ((other,), True), ((held,), False)):
        got = run_requests(engines(way), requests(*automata, stream=stream))
        assert got == run_requests(plain, requests(*automata))


def test_an_automaton_that_is_too_large_is_followed_by_the_host(model, plain, monkeypatch):
    monkeypatch.setattr(constraints_module, "AutomatonLimits", lambda: AutomatonLimits(num_states=8))
    core = make_engine(model, vocabulary=VOCABULARY)
    held = requests(automaton())
    assert run_requests(core, held) == run_requests(plain, requests(automaton()))
    assert not any(request.is_constrained_on_device for request in held)


def test_the_device_holds_whoever_it_can(model):
    core = make_engine(model, vocabulary=VOCABULARY)
    held, other = automaton(), RegularAutomaton(repeat(literal("ab"), 2, 9), VOCABULARY, [EOS])
    some = requests(held, other)
    for request in some:
        core.add_request(request)
    assert [request.is_constrained_on_device for request in some] == [True, False, True, False, False, False]
    while core.has_unfinished_requests():
        core.step()
    late = requests(other)
    core.add_request(late[0])
    assert late[0].is_constrained_on_device


def stale_states(constraint, state, along, landed):
    return state


def of_the_root(constraint, state, drafts):
    found, along = constrained.along_chain(constraint, state, drafts)
    return found, jnp.broadcast_to(along[:, :1], along.shape)


@pytest.mark.parametrize(
    ("name", "bug"), [("after_landing", stale_states), ("along_chain", of_the_root)], ids=["stale", "root"]
)
def test_planted_bugs_are_found(name, bug, model, plain, monkeypatch):
    """The host is not asked what it makes of tokens that are not allowed."""
    monkeypatch.setattr(rounds, name, bug)
    core = speculating_engine(model, model, FixedGamma(NUM_DRAFTS), vocabulary=VOCABULARY)
    advance = RegularAutomaton.advance
    monkeypatch.setattr(RegularAutomaton, "advance", lambda self, state, token: advance(self, state, token) or 0)
    free = [request for request in requests(automaton()) if request.request_id != "5"]
    assert run_requests(core, free) != run_requests(plain, requests(automaton()))[:5]


def test_words_and_automaton_lie_on_the_device_once(model):
    core = make_engine(model, vocabulary=VOCABULARY)
    assert isinstance(core.constraints, DeviceConstraints)
    before = core.runner.models["constraint"].words.symbols
    core.add_request(requests(automaton())[0])
    after = core.runner.models["constraint"]
    assert after.words.symbols is before and isinstance(after.automaton.table, jax.Array)
    assert np.asarray(after.automaton.table).dtype == np.int16


def test_ended_requests_are_not_held_on_to(model):
    core = make_engine(model, vocabulary=VOCABULARY)
    assert core.constraints is not None
    held, free, last = requests(automaton())[:3]
    assert free.constraint is None
    core.add_request(held)
    assert core.constraints._held == [held]
    core.abort(held.request_id)
    core.add_request(free)
    assert core.constraints._held == []
    core.add_request(last)
    core.abort(last.request_id)
    core.constraints.drop_finished()
    assert core.constraints._held == []
