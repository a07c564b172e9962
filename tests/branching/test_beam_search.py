"""Beam search finds what a search over whole sequences finds, and leaks no page."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.branching.beam_search import BeamSearch, BeamSearchParams
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.strategies.beams import BeamRun
from tests.builders import drain, make_request, model_config, random_model, random_prompts, run_requests
from tests.oracle import next_token_logits

EOS = frozenset(range(0, 101, 9))


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(model_config())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()


def searched(
    model: DecoderLM, prompt: list[int], params: BeamSearchParams, eos: frozenset[int]
) -> list[tuple[tuple[int, ...], float]]:
    """(tokens, score) of the best continuations, best first: a search over whole sequences, written for this test."""
    width, power = params.beam_width, params.length_penalty
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    over: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, params.max_tokens + 1):
        found: list[tuple[tuple[int, ...], float]] = []
        for tokens, total in beams:
            after = log_softmax(next_token_logits(model, [*prompt, *tokens], prompt_len=len(prompt)))
            found += [((*tokens, token), total + float(more)) for token, more in enumerate(after)]
        found.sort(key=lambda one: -one[1])
        over += [(tokens, total / length**power) for tokens, total in found[:width] if tokens[-1] in eos]
        over = sorted(over, key=lambda one: -one[1])[:width]
        beams = [one for one in found if one[0][-1] not in eos][:width]
        if len(over) == width and (params.early_stopping or over[-1][1] >= found[0][1] / length**power):
            return over
    over += [(tokens, total / params.max_tokens**power) for tokens, total in beams]
    return sorted(over, key=lambda one: -one[1])[:width]


CASES = [
    (BeamSearchParams(3, 9), frozenset()),
    (BeamSearchParams(1, 6), frozenset()),
    (BeamSearchParams(2, 12, length_penalty=0.0), frozenset({4, 17})),
    (BeamSearchParams(3, 10, length_penalty=2.0, early_stopping=True), frozenset({3, 50, 77})),
    (BeamSearchParams(4, 8, ignore_eos=True), frozenset({3, 50})),
]


@pytest.mark.parametrize(("params", "eos"), CASES)
def test_the_engine_finds_what_a_search_over_whole_sequences_finds(params, eos, model, idle_engine):
    core, prompts = idle_engine(max_num_seqs=8, kv_cache_tokens=512), random_prompts([30, 3, 21], seed=4)
    runs = [BeamRun(core, f"beam {n}", p, BeamSearch(params, eos)).start() for n, p in enumerate(prompts)]
    other = make_request("other", random_prompts([25])[0], max_tokens=15)
    alone = make_request("alone", other.prompt_token_ids, max_tokens=15)
    core.add_request(other)
    drain(core)
    assert all(run.is_done for run in runs) and core.scheduler.kv.allocator.num_held == 0
    eos = frozenset() if params.ignore_eos else eos
    for prompt, run in zip(prompts, runs, strict=True):
        expected = searched(model, prompt, params, eos)
        assert [one.tokens for one in run.search.hypotheses] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([h.score for h in run.search.hypotheses], [s for _, s in expected], rtol=1e-4)
    assert run_requests(core, [alone])[0] == other.output_token_ids


@pytest.mark.parametrize("limits", [{"kv_cache_tokens": 160}, {"enable_prefix_caching": False}])
def test_too_few_pages_or_seats_change_no_beam(limits, idle_engine):
    params, [prompt, other] = BeamSearchParams(4, 24), random_prompts([41, 70], seed=2)
    roomy, core = idle_engine(max_num_seqs=8, kv_cache_tokens=512), idle_engine(**limits)
    found = []
    for engine in (roomy, core):
        run = BeamRun(engine, "beams", prompt, BeamSearch(params)).start()
        engine.add_request(make_request("other", other, max_tokens=40))
        drain(engine)
        assert engine.scheduler.kv.allocator.num_held == 0
        found.append([(one.tokens, round(one.score, 4)) for one in run.search.hypotheses])
    assert found[0] == found[1]


def test_beams_share_pages_and_those_given_up_return_theirs(idle_engine):
    core, [prompt] = idle_engine(max_num_seqs=8, kv_cache_tokens=512), random_prompts([40])
    run = BeamRun(core, "beams", prompt, BeamSearch(BeamSearchParams(4, 40))).start()
    allocator, most = core.scheduler.kv.allocator, 0
    while not run.is_done:
        core.step()
        core.check_integrity()
        most = max(most, allocator.num_held)
    # The trunk's 9 pages are cached; 40 tokens of 4 beams that shared nothing would be 44 more.
    assert most < 30, most
    drain(core)
    assert allocator.num_held == 0


def test_an_interruption_between_a_choice_and_its_forks_changes_no_beam(idle_engine, monkeypatch):
    """A beam that no fork has registered is found by the recovery, with its number."""
    params, prompt = BeamSearchParams(4, 9), random_prompts([30])[0]
    core = idle_engine(max_num_seqs=8, kv_cache_tokens=512)
    before = make_request("before", random_prompts([9])[0], max_tokens=2)
    wanted = BeamRun(core, "wanted", prompt, BeamSearch(params, frozenset())).start()
    core.add_request(before)
    drain(core)
    run, fork, numbers = BeamRun(core, "beam", prompt, BeamSearch(params, frozenset())).start(), core.fork, []

    def interrupted(parent, child):
        if not numbers:
            numbers.extend(beam.arrival for beam in run.beams)
            raise KeyboardInterrupt
        fork(parent, child)

    monkeypatch.setattr(core, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drain(core)
    assert len(set(numbers)) == 4 and min(numbers) > before.arrival
    drain(core)
    assert [one.tokens for one in run.search.hypotheses] == [one.tokens for one in wanted.search.hypotheses]
    assert core.scheduler.kv.allocator.num_held == 0


def test_a_search_can_be_given_up(idle_engine):
    core, [prompt] = idle_engine(max_num_seqs=8, kv_cache_tokens=512), random_prompts([40])
    run = BeamRun(core, "beams", prompt, BeamSearch(BeamSearchParams(4, 40))).start()
    for _ in range(8):
        core.step()
    run.abort()
    drain(core)
    assert run.is_done and not core.searches and core.scheduler.kv.allocator.num_held == 0


@pytest.mark.parametrize(("searches", "width"), [(1, 8), (2, 4)])
def test_beams_that_do_not_fit_into_the_pool_together_take_turns(searches, width, idle_engine):
    """Held beams give up their pages to those that are waited for, and keep the tokens that have landed."""
    params, prompts = BeamSearchParams(width, 90), random_prompts([3] * searches, seed=0)
    found = []
    for tokens in (1024, 160):
        core = idle_engine(max_num_seqs=8, kv_cache_tokens=tokens)
        runs = [BeamRun(core, f"beams {n}", prompt, BeamSearch(params)).start() for n, prompt in enumerate(prompts)]
        preemptions = core.scheduler.num_preemptions
        drain(core)
        found.append([[(one.tokens, round(one.score, 4)) for one in run.search.hypotheses] for run in runs])
    assert core.scheduler.num_preemptions > preemptions, "the pool held all beams"
    assert found[0] == found[1]


def test_a_search_of_which_a_beam_is_aborted_fails_whole(idle_engine):
    core, [prompt] = idle_engine(max_num_seqs=8, kv_cache_tokens=512), random_prompts([40])
    run = BeamRun(core, "beams", prompt, BeamSearch(BeamSearchParams(4, 40))).start()
    for _ in range(8):
        core.step()
    core.abort(run.beams[0].request_id)
    drain(core)
    assert run.is_done and run.error == "a beam was aborted" and core.scheduler.kv.allocator.num_held == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer of at least 1, got 0"),
        ({"beam_width": 11}, "beam_width must be at most 10, got 11"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer of at least 1, got 1.5"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number, got nan"),
        ({"early_stopping": "never"}, "early_stopping must be True or False, got 'never'"),
    ],
)
def test_bad_parameters_are_named(fields, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})


def test_more_beams_than_requests_are_refused(idle_engine):
    with pytest.raises(ValueError, match="beam_width=5 needs as many requests at once, max_num_seqs is 4"):
        BeamRun(idle_engine(), "wide", [1, 2], BeamSearch(BeamSearchParams(5, 5)))


def test_more_ends_than_can_be_looked_for_are_refused():
    with pytest.raises(ValueError, match="looks at 39 tokens after each beam, at most 20 can be had"):
        BeamSearch(BeamSearchParams(3, 5), EOS)
