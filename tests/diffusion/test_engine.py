"""Block diffusion in the engine gives the tokens of a plain loop over whole sequences, whatever else runs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cli.show_denoising import BlockHistory
from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.strategy import LandedRounds
from jaxinfer.outputs import DenoisedBlock
from jaxinfer.scheduling.pace import Pace
from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.strategies.block_diffusion import Denoiser
from tests.builders import drain, make_request, one_by_one, random_model, random_prompts, run_requests
from tests.diffusion import oracle
from tests.diffusion.builders import (
    BLOCK,
    MASK,
    diffusion_engine,
    diffusion_model_config,
    diffusion_of,
    generated,
    replace_ending,
    requests,
)


@pytest.fixture(scope="module")
def model():
    return random_model(diffusion_model_config())


@pytest.fixture(scope="module")
def engine(model) -> EngineCore:
    return diffusion_engine(model)


@pytest.fixture
def core(engine) -> EngineCore:
    assert not engine.has_unfinished_requests() and engine.reset_prefix_cache()
    return engine


@pytest.fixture(scope="module")
def wanted(model) -> list[list[int]]:
    return [generated(model, request).tokens for request in requests()]


def test_a_request_alone_gets_the_tokens_of_the_loop(core, wanted):
    assert one_by_one(core, requests()) == wanted


def test_requests_together_get_the_tokens_of_the_loop(core, wanted):
    """In a pool too small for all of them, with chunks of prompts beside blocks."""
    before = core.get_metrics()
    preemptions, forwards = before.num_preemptions_total, before.diffusion_forwards_total
    assert run_requests(core, requests()) == wanted
    after = core.get_metrics()
    assert after.num_preemptions_total > preemptions
    assert after.diffusion_forwards_total > forwards and after.diffusion_tokens_per_forward > 0
    # In the cache now: whole blocks alone, their final keys and values.
    hits = after.prefix_cache_hits
    assert run_requests(core, requests()) == wanted
    assert core.get_metrics().prefix_cache_hits > hits


@pytest.mark.parametrize(
    "limits",
    [
        {"enable_prefix_caching": False},
        {"overlap": False},
        pytest.param({"page_size": 4}, marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 1}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda limits: next(iter(limits)),
)
def test_settings_of_the_engine_do_not_change_tokens(limits, model, wanted):
    assert run_requests(diffusion_engine(model, **limits), requests()) == wanted


@pytest.mark.parametrize("order", [0, 1])
def test_tokens_do_not_depend_on_order_and_neighbours(order, model, wanted):
    """Sixteen at once: each request twice, and some more."""
    core = diffusion_engine(model, max_num_seqs=16, kv_cache_tokens=1024, max_num_batched_tokens=128)
    twice = [*requests(), *requests()]
    for number, request in enumerate(twice):
        request.request_id = str(number)
    index = np.random.default_rng(order).permutation(len(twice)).tolist()
    got = run_requests(core, [twice[i] for i in index])
    assert got == [wanted[i % len(wanted)] for i in index]


CONFIGS = {
    "hierarchy": (
        DiffusionConfig(unmask="hierarchy", threshold=0.2, low_threshold=0.05),
        oracle.by_hierarchy(0.2, 0.05),
    ),
    "factor": (DiffusionConfig(unmask="factor", factor=2.5), oracle.by_factor(2.5)),
    "one token a round": (DiffusionConfig(threshold=1.0, maximum_unroll=7, expected_tpf=1), oracle.by_threshold(1.0)),
}


LONG = ("factor", "one token a round")


@pytest.mark.parametrize("name", ["hierarchy", *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)])
def test_rules(name, model):
    config, rule = CONFIGS[name]
    got = one_by_one(diffusion_engine(model, config), requests()[:4])
    assert got == [generated(model, request, rule).tokens for request in requests()[:4]]


def test_credits_of_rounds_before_count(model):
    config = DiffusionConfig(threshold=0.2, unmask="credit", credit_alpha=0.9, boost_gamma=0.3, decay_beta=0.7)
    rule = oracle.by_threshold(0.2)
    # Seats are used again: credits end with their block.
    core = diffusion_engine(model, config, max_num_seqs=2)
    found = [generated(model, request, rule, credit=(0.9, 0.3, 0.7)).tokens for request in requests()[:5]]
    assert run_requests(core, requests()[:5]) == found
    assert found != [generated(model, request, rule).tokens for request in requests()[:5]]


def test_committed_tokens_are_edited(model):
    config = DiffusionConfig(threshold=0.1, edit_threshold=0.12, max_post_edit_steps=2)
    got = one_by_one(diffusion_engine(model, config), requests()[:5])
    found = [generated(model, r, edit_threshold=0.12, max_post_edit_steps=2).tokens for r in requests()[:5]]
    assert got == found != [generated(model, request).tokens for request in requests()[:5]]


def test_every_round_commits_what_the_loop_commits(core, model):
    history = BlockHistory()
    rounds: list[tuple[int, tuple[int, ...]]] = []

    def listen(landed: LandedRounds[DenoiseOutput]) -> None:
        if landed.requests:
            rounds.extend((found.start, found.tokens) for found in history.rounds(landed))

    diffusion_of(core).listeners.append(listen)
    for request, same in zip(requests()[:4], requests()[:4], strict=True):
        rounds.clear()
        run_requests(core, [request])
        assert rounds == generated(model, same).rounds
    diffusion_of(core).listeners.remove(listen)


def test_requests_return_their_blocks_after_each_round_if_they_ask(core, model):
    for request, same in zip(requests(return_blocks=True)[:4], requests()[:4], strict=True):
        run_requests(core, [request])
        wanted = []
        for start, tokens in generated(model, same).rounds:
            given, end = max(0, request.num_prompt_tokens - start), request.max_total_tokens - start
            places = [None if token == MASK else token for token in tokens[given:end]]
            wanted.append(DenoisedBlock(start + given - request.num_prompt_tokens, places))
        assert request.blocks == wanted
    (other,) = requests()[:1]
    run_requests(core, [other])
    assert other.blocks == []


@pytest.mark.parametrize("count", [0, 2])
def test_log_probabilities_are_those_of_the_round_that_committed(core, model, count):
    some = requests(logprobs=count)[:4]
    tokens = run_requests(core, some)
    for request, same, own in zip(some, requests()[:4], tokens, strict=True):
        found = generated(model, same)
        assert own == found.tokens
        got = [entry[token].logprob for entry, token in zip(request.logprobs, own, strict=True)]
        np.testing.assert_allclose(got, found.logprobs, atol=1e-4)
        assert all(len(entry) in (max(1, count), count + 1) for entry in request.logprobs)


def test_a_sequence_ends_with_its_first_ending_token(core, model, wanted):
    ending = [replace_ending(request, tokens[6]) for request, tokens in zip(requests(), wanted, strict=True)]
    same = [replace_ending(request, tokens[6]) for request, tokens in zip(requests(), wanted, strict=True)]
    got = run_requests(core, ending)
    assert got == [tokens[: tokens.index(tokens[6]) + 1] for tokens in wanted]
    assert got == [generated(model, request).tokens for request in same]
    assert all(request.status is RequestStatus.FINISHED_STOPPED for request in ending)


def test_a_block_in_which_the_sequence_ends_lands_without_a_commit_round(core, model):
    """It lands without what would follow the end."""
    (prompt,) = random_prompts((9,), vocab_size=MASK)  # its first block has three places
    for max_tokens in (1, 2, 3, 5):
        request = make_request("a", prompt, max_tokens=max_tokens)
        found = generated(model, request)
        before = core.get_metrics()
        assert run_requests(core, [request])[0] == found.tokens
        after = core.get_metrics()
        assert after.diffusion_tokens_total - before.diffusion_tokens_total == max_tokens
        assert after.diffusion_forwards_total - before.diffusion_forwards_total == len(found.rounds)


def test_streams_get_whole_blocks_and_the_first_by_itself(core, wanted):
    """As long as nothing is known of how long rounds take, a launch has one."""
    core.scheduler.pace = Pace()
    streaming = requests(stream=True)[:1]
    core.add_request(streaming[0])
    sizes = []
    while core.has_unfinished_requests():
        sizes += [last - first for _, first, last in core.step()]
    assert streaming[0].output_token_ids == wanted[0]
    # Its prompt ends with a block.
    assert sum(sizes) == 24 and all(size % BLOCK == 0 for size in sizes) and sizes[0] == BLOCK


def test_a_request_takes_the_place_of_one_that_ended_at_once(core):
    """While the others are in the middle of their blocks."""
    prompts = random_prompts([8] * 5, vocab_size=MASK)
    some = [make_request(str(i), prompt, max_tokens=8 if i == 1 else 40) for i, prompt in enumerate(prompts)]
    for request in some:
        core.add_request(request)
    while not some[1].is_finished:
        core.step()
        assert some[4].status is RequestStatus.WAITING
    core.step()
    assert some[4].status is RequestStatus.RUNNING
    assert not any(some[i].is_finished for i in (0, 2, 3))
    drain(core)


def test_requests_can_be_aborted_and_others_go_on(core, wanted):
    some = requests()[:4]
    for request in some:
        core.add_request(request)
    for _ in range(4):
        core.step()
    assert core.abort("1")
    drain(core)
    assert [some[i].output_token_ids for i in (0, 2, 3)] == [wanted[i] for i in (0, 2, 3)]
    core.check_integrity()


def test_nothing_of_another_size_than_blocks_enters_the_cache(core, wanted):
    run_requests(core, requests()[2:3])
    (request,) = requests()[2:3]
    known = [*request.prompt_token_ids, *wanted[2]]
    cache = core.prefix_cache
    assert cache is not None
    size = core.config.page_size
    assert cache.num_pages == len(known) // size


def test_pages_hold_whole_blocks(model):
    with pytest.raises(ValueError, match=r"page_size \(2\) must be a multiple of blocks of 4"):
        diffusion_engine(model, page_size=2)


def test_a_denoiser_says_what_an_engine_needs(model):
    config = EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, page_size=8, kv_cache_tokens=64)
    denoiser = Denoiser(DiffusionConfig())
    assert denoiser.tail_tokens(config) == denoiser.kv_bytes_per_token(jnp.dtype("float32")) == 0
