"""Recorded checkpoints of every family in the engine: their tokens in every way in which requests run.

Windows are shorter than the prompts, and a sequence of `phi3_crossing` outgrows its original length.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.models.decoder import DecoderLM
from tests.branching.builders import make_group, run_groups
from tests.builders import make_engine, make_request, one_by_one, random_prompts, run_requests
from tests.hf_fixtures import NAMES, Expected, checkpoint_path, expected
from tests.oracle import greedy_tokens
from tests.speculative.builders import WAYS, engine_of

# Sinks and windows; two rotations, heads by layer and keys of other layers; a change of all keys. The logits of all are
# compared by tests/models/test_hf_parity.py.
QUICK = ("gpt_oss", "gemma4_e2b", "phi3_crossing")
PICKED = (3, 5, 7)  # of the recorded prompts: 16, 33 and 100 tokens


@dataclass(frozen=True)
class Case:
    model: DecoderLM
    recorded: Expected

    def requests(self, tokens: int = 32) -> list:
        return [
            make_request(str(i), self.recorded.prompts[i], max_tokens=tokens, stream=i == PICKED[0]) for i in PICKED
        ]

    @property
    def wanted(self) -> list[list[int]]:
        return [self.recorded.greedy[i] for i in PICKED]


def named(*quick: str) -> list:
    """All recorded checkpoints, of which some run by default."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in NAMES]


@functools.cache
def case_of(name: str) -> Case:
    _, model = load_checkpoint(checkpoint_path(name))
    return Case(model, expected(name))


@pytest.mark.parametrize("name", named(*QUICK))
def test_requests_alone_together_cut_preempted_and_cached_get_the_recorded_tokens(name):
    case = case_of(name)
    core = make_engine(case.model, max_num_batched_tokens=20, kv_cache_tokens=176)
    assert one_by_one(core, case.requests()) == case.wanted
    assert core.reset_prefix_cache()
    assert run_requests(core, case.requests()) == case.wanted
    assert core.get_metrics().num_preemptions_total > 0
    hits = core.get_metrics().prefix_cache_hits
    assert run_requests(core, case.requests()) == case.wanted
    assert core.get_metrics().prefix_cache_hits > hits


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "trees" else [pytest.mark.slow]) for way in WAYS])
@pytest.mark.parametrize("name", named("gpt_oss"))
def test_speculating_requests_get_the_recorded_tokens(name, way):
    case = case_of(name)
    core = engine_of(way, case.model, kv_cache_tokens=352)
    assert run_requests(core, case.requests()) == case.wanted


@pytest.mark.parametrize("mode", ["in_one_sequence", pytest.param("batching", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", named("gpt_oss", "phi3_crossing"))
def test_branches_that_outgrow_the_window_get_the_tokens_that_each_gets_alone(name, mode):
    case = case_of(name)
    prefix, *suffixes = random_prompts((21, 3, 6, 1), seed=5)
    wanted = [greedy_tokens(case.model, [*prefix, *suffix], 30) for suffix in suffixes]
    core = make_engine(case.model, max_decode_steps=8)
    group = make_group("g", prefix, suffixes, branch_mode=mode, max_tokens=30)
    assert run_groups(core, [group]) == wanted
