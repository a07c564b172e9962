"""A sequence whose logits become NaN lands -2 where it would have its next token, in every way of decoding, and ends on
the device; those beside it get their tokens, and no token outside the vocabulary is ever looked up.

One row of the embedding table is NaN: with that token, everything computed from it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import unpack
from jaxinfer.programs.program import TARGET
from jaxinfer.programs.step import StepOutput
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.scheduling.request import Request
from jaxinfer.speculative.draft_model import DRAFTER
from jaxinfer.speculative.eagle3 import EAGLE3_HEAD
from jaxinfer.speculative.gamma import FixedGamma
from jaxinfer.speculative.tree import Tree
from tests.builders import make_engine, make_request, model_config, random_model, random_prompts
from tests.constraints.toys import RandomAutomaton
from tests.diffusion.bidirectional_builders import bidirectional_config, diffusion_config, engine_of
from tests.diffusion.builders import MASK, diffusion_engine, diffusion_model_config
from tests.speculative.builders import NUM_DRAFTS, random_head, speculating_engine

SIZE = 101
FAILING = 1  # the request
MOST_STEPS = 200
TREES = {"num_speculative_tokens": 12, "tree_depth": NUM_DRAFTS - 1, "tree_top_k": 4}


def copied(model: Any) -> Any:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: x, state))


def poisoned(model: Any, token: int) -> Any:
    """A copy of a model for which one token is NaN."""
    copy = copied(model)
    table = copy.embed.embedding
    table[...] = table[...].at[token].set(jnp.nan)
    return copy


class Landed:
    """What launches land in each seat, as it comes from the device."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.drafts: list[np.ndarray] = []  # of trees, as far as there are nodes
        launch = core.runner.launch

        def watched(program: Any, shape: Any, *inputs: Any) -> Any:
            results = launch(program, shape, *inputs)
            if isinstance(results, StepOutput) or hasattr(results, "tokens") or getattr(results, "ndim", 0) == 2:
                samples = unpack(jnp.asarray(inputs[0]), getattr(shape, "batch", shape)).samples
                is_step = isinstance(results, StepOutput)
                tokens = results.token_ids[None] if is_step else getattr(results, "tokens", results)
                self._note(np.asarray(tokens), np.asarray(samples.seat))
                if isinstance(tree := getattr(results, "tree", None), Tree):
                    self.drafts.append(np.asarray(tree.tokens)[np.asarray(tree.there)])
            return results

        monkeypatch.setattr(core.runner, "launch", watched)

    def _note(self, tokens: np.ndarray, seats: np.ndarray) -> None:
        for column, seat in enumerate(seats.tolist()):
            self.tokens.setdefault(seat, []).extend(token for token in tokens[:, column].tolist() if token != -1)


def ran(core: EngineCore, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What lands for each request, until all others have ended and the failing one has failed or ended, too.

    The engine is fresh afterwards.
    """
    with monkeypatch.context() as patch:
        landed = Landed(core, patch)
        for request in requests:
            core.add_request(request)
        for _ in range(MOST_STEPS):
            core.step()
            ended = [request.is_finished for request in requests]
            ended[FAILING] |= NO_SCORE in landed.tokens.get(requests[FAILING].seat, ())
            if all(ended):
                break
        else:
            raise AssertionError(f"after {MOST_STEPS} steps, what has ended is {ended}, landed {landed.tokens}")
        for _ in range(3):
            core.step()
    core.abort(requests[FAILING].request_id)
    while core.has_unfinished_requests():
        core.step()
    core.step()
    core.reset_prefix_cache()
    return [landed.tokens[request.seat] for request in requests]


type Make = Callable[[], list[Request]]


def check_failure(
    core: EngineCore, model: DecoderLM, make: Make, monkeypatch: pytest.MonkeyPatch, *, block: int = 1
) -> None:
    """Let the failing request generate the NaN token amid its output, and compare with what comes without NaN."""
    requests = make()
    sound = ran(core, requests, monkeypatch)
    outputs = {number: request.output_token_ids for number, request in enumerate(requests)}
    seen = {token for request in requests for token in request.prompt_token_ids}
    seen |= {token for number, output in outputs.items() if number != FAILING for token in output}
    own = outputs[FAILING]
    place = next(i for i, token in enumerate(own) if i >= 2 and token not in seen and token not in own[:i])
    assert place < len(own) - 2 * block, "there must be something left that fails"
    core.runner.set_model(TARGET, poisoned(model, own[place]))
    try:
        landed = ran(core, make(), monkeypatch)
    finally:
        core.runner.set_model(TARGET, model)
    for number, tokens in enumerate(sound):
        assert number == FAILING or landed[number] == tokens
    before = landed[FAILING][: landed[FAILING].index(NO_SCORE)]
    assert before == own[: len(before)]
    # The host decides of a bidirectional row whether it has another round; it fails again.
    assert set(landed[FAILING][len(before) :]) == {NO_SCORE} and (block > 1 or len(landed[FAILING]) == len(before) + 1)
    # Of blocks, the one with the token fails, or the one after it.
    assert place - block < len(before) <= place + block


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(model_config())


def requests(**more: Any) -> Make:
    def make() -> list[Request]:
        prompts = random_prompts((12, 7, 21), seed=4)
        return [make_request(str(i), prompt, **{"max_tokens": 24, **more}) for i, prompt in enumerate(prompts)]

    return make


SAMPLED = {"temperature": 0.9, "seed": 3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "top-k": {**SAMPLED, "top_k": 20, "top_p": 0.95},
    "nucleus of many": {"temperature": 3.0, "seed": 3, "top_p": 0.99},
}


@pytest.fixture(scope="module")
def plain(model) -> EngineCore:
    return make_engine(model)


@pytest.mark.parametrize("kind", KINDS)
def test_in_decode_loops(plain, model, kind, monkeypatch):
    check_failure(plain, model, requests(**KINDS[kind]), monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_in_steps(plain, model, kind, monkeypatch):
    check_failure(plain, model, requests(stream=True, **KINDS[kind]), monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bound_draws_with_log_probabilities(plain, model, kind, monkeypatch):
    check_failure(plain, model, requests(logit_bias={5: 0.5}, logprobs=2, **KINDS[kind]), monkeypatch)


def test_in_constrained_loops(plain, model, monkeypatch):
    held = RandomAutomaton(SIZE, [SIZE - 1], share=1.0, ends=0)

    def make() -> list[Request]:
        prompts = random_prompts((12, 7, 21), vocab_size=SIZE, seed=4)
        return [make_request(str(i), prompt, max_tokens=14, constraint=held) for i, prompt in enumerate(prompts)]

    check_failure(plain, model, make, monkeypatch)


def test_a_prompt_that_is_nan_lands_nothing_else(plain, model, monkeypatch):
    sound = ran(plain, requests()(), monkeypatch)
    made = requests()()
    token = next(
        token
        for token in made[FAILING].prompt_token_ids
        if not any(token in (*made[i].prompt_token_ids, *sound[i]) for i in (0, 2))
    )
    plain.runner.set_model(TARGET, poisoned(model, token))
    try:
        landed = ran(plain, made, monkeypatch)
    finally:
        plain.runner.set_model(TARGET, model)
    assert landed == [sound[0], [NO_SCORE], sound[2]]


@pytest.fixture(scope="module")
def speculating(model) -> Callable[[str], EngineCore]:
    made: dict[str, EngineCore] = {}

    def get(way: str) -> EngineCore:
        if way not in made:
            drafter = {"n-grams": None, "a draft model": model}.get(way, random_head(model.config))
            is_tree = way == "trees"
            controller = FixedGamma(NUM_DRAFTS, TREES["num_speculative_tokens"] if is_tree else 0)
            made[way] = speculating_engine(
                model, drafter, controller, speculative=TREES if is_tree else None, kv_cache_tokens=256
            )
        return made[way]

    return get


WAYS = ("n-grams", "a draft model", "a head", "trees")


@pytest.mark.parametrize("kind", ["greedy", "top-k"])
@pytest.mark.parametrize("way", WAYS)
def test_in_rounds_of_speculation(speculating, model, way, kind, monkeypatch):
    check_failure(speculating(way), model, requests(**KINDS[kind]), monkeypatch)


@pytest.mark.parametrize("kind", ["greedy", "top-k"])
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_drafter_that_is_nan_changes_no_token(speculating, model, way, kind, monkeypatch):
    core, name = speculating(way), DRAFTER if way == "a draft model" else EAGLE3_HEAD
    made = requests(**KINDS[kind])()
    for request in made:
        core.add_request(request)
    while core.has_unfinished_requests():
        core.step()
    drafter = core.runner.weights[name].module
    broken = copied(drafter)
    broken.final_norm.scale[...] = jnp.full_like(broken.final_norm.scale[...], jnp.nan)
    core.runner.set_model(name, broken)
    again = requests(**KINDS[kind])()
    try:
        with monkeypatch.context() as patch:
            landed = Landed(core, patch)
            for request in again:
                core.add_request(request)
            while core.has_unfinished_requests():
                core.step()
    finally:
        core.runner.set_model(name, drafter)
    assert [request.output_token_ids for request in again] == [request.output_token_ids for request in made]
    assert all(((drafts >= 0) & (drafts < SIZE)).all() for drafts in landed.drafts)


BLOCK_MODEL = random_model(diffusion_model_config())
WHOLE_MODEL = random_model(bidirectional_config())


def blocks(**more: Any) -> Make:
    def make() -> list[Request]:
        prompts = random_prompts((10, 9, 21), vocab_size=MASK, seed=4)
        return [make_request(str(i), prompt, **{"max_tokens": 36, **more}) for i, prompt in enumerate(prompts)]

    return make


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("threshold", "greedy"),
        pytest.param("credit", "sampled", marks=pytest.mark.slow),
        pytest.param("factor", "greedy", marks=pytest.mark.slow),
    ],
)
def test_in_blocks(rule, kind, monkeypatch):
    core = diffusion_engine(BLOCK_MODEL, DiffusionConfig(threshold=0.1, expected_tpf=1, unmask=rule))
    check_failure(core, BLOCK_MODEL, blocks(**KINDS[kind]), monkeypatch, block=4)


@pytest.mark.parametrize("cache", [pytest.param("prefix", marks=pytest.mark.slow), "dual"])
def test_in_whole_sequences_and_windows(cache, monkeypatch):
    core = engine_of(WHOLE_MODEL, diffusion_config(cache=cache), kv_cache_tokens=256, max_num_batched_tokens=256)
    check_failure(core, WHOLE_MODEL, blocks(**SAMPLED), monkeypatch, block=6)
