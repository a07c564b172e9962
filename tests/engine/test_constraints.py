"""Constrained requests get the tokens of a plain loop with whole masks, in every way of decoding."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.scheduling.request import Request
from tests.builders import make_engine, make_request, model_config, random_model, random_prompts, run_requests
from tests.constraints.oracle import constrained_output
from tests.constraints.toys import RandomAutomaton
from tests.speculative.builders import WAYS, engine_of

pytestmark = pytest.mark.unoptimized

VOCAB, EOS = 101, 100
LOOSE = RandomAutomaton(VOCAB, [EOS], share=0.9, seed=1)
HALF = RandomAutomaton(VOCAB, [EOS], share=0.5, forces=0.05, seed=2)
TIGHT = RandomAutomaton(VOCAB, [EOS], share=0.05, forces=0.3, ends=0.04, seed=3)
RUNS = RandomAutomaton(VOCAB, [EOS], share=0.6, forces=0.85, ends=0.01, seed=4)
KINDS: dict[str, dict[str, Any]] = {
    "free": {"temperature": 0.7, "seed": 1},
    "loose": {"constraint": LOOSE},
    "half": {"constraint": HALF, "temperature": 0.9, "seed": 3},
    "tight": {"constraint": TIGHT, "temperature": 1.2, "seed": 4, "top_p": 0.7},
    "runs": {"constraint": RUNS, "temperature": 0.8, "seed": 5},
    "few": {"constraint": HALF, "temperature": 1.0, "seed": 6, "top_k": 3, "min_p": 0.02},
    "penalized": {"constraint": HALF, "frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "biased": {"constraint": LOOSE, "logit_bias": {5: 4.0, 6: 3.0}, "allowed_token_ids": [*range(60), EOS]},
    "looked at": {"constraint": HALF, "logprobs": 2, "temperature": 0.6, "seed": 7},
    "least": {"constraint": HALF, "min_tokens": 9, "temperature": 1.0, "seed": 8},
    "bad words": {"bad_token_ids": [(7,), *[(a, b) for a in range(0, 101, 3) for b in range(0, 101, 2)]]},
    "bad too": {"constraint": LOOSE, "bad_token_ids": [(1, 2), (3, 4, 5)], "temperature": 1.3, "seed": 9},
}


def requests() -> list[Request]:
    prompts = random_prompts((12, 30, 9, 5, 17, 22, 3, 8, 26, 14, 6, 19))
    return [
        make_request(name, prompt, max_tokens=21, **{"eos_token_ids": [EOS], **kind})
        for prompt, (name, kind) in zip(prompts, KINDS.items(), strict=True)
    ]


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module")
def expected(model) -> dict[str, tuple[list[int], str]]:
    return {request.request_id: constrained_output(model, request) for request in requests() if request.guard}


@pytest.fixture(scope="module")
def engines(model):
    made: dict[str, EngineCore] = {}

    def get(way: str) -> EngineCore:
        if way not in made:
            made[way] = engine_of(way, model, **({} if way == "loops" else {"kv_cache_tokens": 256}))
        return made[way]

    return get


def outcomes(core: EngineCore, made: list[Request]) -> dict[str, tuple[list[int], str]]:
    run_requests(core, made)
    return {one.request_id: (one.output_token_ids, one.status.value) for one in made if one.guard}


def test_the_kinds_differ_in_how_much_they_refuse(expected):
    ends = [reason for _, reason in expected.values()]
    assert {"stop", "length"} <= set(ends)


@pytest.mark.parametrize("way", WAYS)
def test_constrained_requests_get_the_tokens_of_the_oracle(way, engines, expected):
    assert outcomes(engines(way), requests()) == expected
