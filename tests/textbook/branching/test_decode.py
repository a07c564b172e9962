"""Branches decode to the same tokens as one padded rectangle a round, as one sequence, and in the engine."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from jaxinfer.models.rope import RopeConfig
from jaxinfer.textbook.branching import BranchForward, CachedForward, decode_branches
from tests.builders import model_config, random_model, random_prompts
from tests.oracle import greedy_tokens, next_token_logits

TOLERANCE = 1e-4  # of logits that are about 10
OWN_MODES = ("padded", "in_one_sequence")
PREFIX = random_prompts([9])[0]
BRANCHES = random_prompts([3, 1, 6, 2], seed=1)


@cache
def the_model(family: str = "Qwen3ForCausalLM"):
    return random_model(model_config(family))


@cache
def expected(branch: int, count: int, family: str = "Qwen3ForCausalLM") -> tuple[int, ...]:
    return tuple(greedy_tokens(the_model(family), [*PREFIX, *BRANCHES[branch]], count))


# A decoder, by the objects of the package alone.


@pytest.mark.parametrize("branch_mode", OWN_MODES)
@pytest.mark.parametrize("family", ["Qwen3ForCausalLM", "Qwen2ForCausalLM"])
def test_branches_have_the_tokens_of_sequences_of_their_own(family, branch_mode):
    got = decode_branches(the_model(family), PREFIX, BRANCHES, 6, branch_mode)
    assert got == [list(expected(branch, 6, family)) for branch in range(4)]


@pytest.mark.parametrize("branch_mode", OWN_MODES)
def test_branches_that_end_at_different_lengths_change_no_token_of_the_others(branch_mode):
    limits = [2, 9, 1, 5]
    got = decode_branches(the_model(), PREFIX, BRANCHES, limits, branch_mode)
    assert got == [list(expected(branch, limit)) for branch, limit in enumerate(limits)]


@pytest.mark.parametrize("branch_mode", OWN_MODES)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_branches_that_join_when_another_has_ended_have_the_same_tokens(branch_mode, most):
    limits = [2, 9, 4, 5]
    got = decode_branches(the_model(), PREFIX, BRANCHES, limits, branch_mode, max_parallel_branches=most)
    assert got == [list(expected(branch, limit)) for branch, limit in enumerate(limits)]


@pytest.mark.parametrize("branch_mode", OWN_MODES)
def test_a_branch_ends_with_a_stop_token(branch_mode):
    whole = expected(1, 9)
    stop = whole[4]
    got = decode_branches(the_model(), PREFIX, BRANCHES[1:2], 9, branch_mode, stop_token_ids=[stop])
    assert got == [list(whole[: whole.index(stop) + 1])]


def test_without_a_prefix_branches_are_sequences_of_their_own():
    wanted = [greedy_tokens(the_model(), branch, 3) for branch in BRANCHES]
    for mode in OWN_MODES:
        assert decode_branches(the_model(), [], BRANCHES, 3, mode) == wanted


def test_a_padded_round_computes_a_rectangle_and_one_sequence_only_tokens():
    shapes = {}
    for mode in OWN_MODES:
        forward = CachedForward(the_model())
        run = BranchForward(forward, PREFIX, use_bim_mode=mode == "in_one_sequence", num_branches=4, capacity=60)
        run.add_branches(dict(enumerate(BRANCHES[:3])))
        run.decode({0: [1], 1: [2, 3], 2: [4]})
        run.decode({0: [1], 2: [4]}, joining={3: BRANCHES[3]})
        shapes[mode] = forward.shapes
    assert shapes == {
        "padded": [(1, 9), (4, 6), (4, 2), (4, 2)],
        "in_one_sequence": [(1, 9), (1, 10), (1, 4), (1, 4)],
    }


# Continuous decoding: 200 tokens join two branches of 150 that decode 2.


@pytest.mark.parametrize("use_bim_mode", [False, True])
def test_a_prompt_of_200_joins_two_branches_of_150_and_all_answer_as_they_do_alone(use_bim_mode):
    prefix, first, second, joining = random_prompts([50, 100, 100, 200], seed=5)
    run = BranchForward(the_model(), prefix, use_bim_mode=use_bim_mode, num_branches=3, capacity=460)
    run.add_branches({0: first, 1: second})
    logits = run.decode({0: [7, 8], 1: [9, 10]}, joining={2: joining})
    if not use_bim_mode:
        assert run.manager.alignment_manager.cache_length == run.manager.cache.current_length == 350
        assert run.manager.alignment_manager.valid_lengths.tolist() == [152, 152, 250]
    assert run.forward.shapes == [(1, 50), *([(1, 200), (1, 204)] if use_bim_mode else [(3, 100), (3, 200)])]
    for branch, own in enumerate(([*first, 7, 8], [*second, 9, 10], joining)):
        alone = next_token_logits(the_model(), [*prefix, *own])
        np.testing.assert_allclose(logits[branch], alone, rtol=TOLERANCE, atol=TOLERANCE)


# A switch of modes with the KV.


@pytest.mark.parametrize("use_bim_mode", [False, True])
def test_branches_continue_in_the_other_mode_from_their_kv(use_bim_mode):
    run = BranchForward(the_model(), PREFIX, use_bim_mode=use_bim_mode, num_branches=4, capacity=60)
    run.add_branches(dict(enumerate(BRANCHES[:3])))
    run.decode({0: [1], 1: [2, 3, 4], 2: []})
    run.manager.remove_branch(0)
    run.manager.switch_mode(not use_bim_mode)
    logits = run.decode({1: [5], 2: [6, 7]}, joining={3: BRANCHES[3]})
    run.manager.switch_mode(use_bim_mode)
    logits |= run.decode({1: [8]})
    for branch, own in ((1, [2, 3, 4, 5, 8]), (2, [6, 7]), (3, [])):
        alone = next_token_logits(the_model(), [*PREFIX, *BRANCHES[branch], *own])
        np.testing.assert_allclose(logits[branch], alone, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(2))
def test_in_any_story_with_switches_branches_answer_as_they_do_alone(seed):
    rng = np.random.default_rng(seed)
    run = BranchForward(the_model(), PREFIX, use_bim_mode=bool(seed % 2), num_branches=6, capacity=128)
    own: dict[int, list[int]] = {}
    started = 0
    for event in ["join", *rng.choice(["join", "decode", "decode", "remove", "switch"], 10)]:
        new: dict[int, list[int]] = {}
        if event == "join" and started < 6:
            new, started = {started: rng.integers(0, 101, int(rng.integers(1, 7))).tolist()}, started + 1
        elif event == "remove" and len(own) > 1:
            branch = int(rng.choice(list(own)))
            run.manager.remove_branch(branch)
            del own[branch]
        elif event == "switch":
            run.manager.switch_mode(not run.manager.use_bim_mode)
        accepted = {branch: rng.integers(0, 101, int(rng.integers(0, 4))).tolist() for branch in own}
        logits = run.decode(accepted, new)
        own = {branch: [*tokens, *accepted[branch]] for branch, tokens in own.items()} | new
        assert logits.keys() == {branch for branch in own if accepted.get(branch) or branch in new}
        for branch, answer in logits.items():
            alone = next_token_logits(the_model(), [*PREFIX, *own[branch]], prompt_len=1)
            np.testing.assert_allclose(answer, alone, rtol=TOLERANCE, atol=TOLERANCE)


def test_kv_that_is_switched_to_the_wrong_place_is_noticed(monkeypatch):
    from jaxinfer.textbook.branching import state_manager

    run = BranchForward(the_model(), PREFIX, use_bim_mode=True, num_branches=3, capacity=60)
    run.add_branches(dict(enumerate(BRANCHES[:3])))
    right = state_manager.rows_of_batch

    def shifted(*arguments):
        alignment, (rows, slots) = right(*arguments)
        return alignment, (rows, np.where(slots > len(PREFIX), slots - 1, slots))

    monkeypatch.setattr(state_manager, "rows_of_batch", shifted)
    run.manager.switch_mode(False)
    logits = run.decode({2: [6]})[2]
    assert np.abs(logits - next_token_logits(the_model(), [*PREFIX, *BRANCHES[2], 6])).max() > 100 * TOLERANCE


# Misuse.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branch_mode": "both"}, "branch_mode: 'both', allowed are padded, batching, in_one_sequence"),
        ({"branch_mode": "batching"}, "branch_mode: 'batching' runs in the engine of an LLM"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_tokens": [1, 1]}, r"max_tokens: \[1, 1\]"),
        ({"branches": [[1], []]}, r"branches: those at \[1\] have no token"),
        ({"max_parallel_branches": 0}, "max_parallel_branches: 0"),
        ({"max_tokens": 300}, "max_tokens: 300, a sequence would have 310 tokens, allowed are 256"),
    ],
)
def test_a_misuse_is_refused_by_name(options, message):
    arguments = {"prefix": PREFIX, "branches": [[1]], "max_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        decode_branches(the_model(), **arguments)


def test_tokens_of_a_branch_that_is_not_there_are_refused():
    run = BranchForward(the_model(), PREFIX, use_bim_mode=True, num_branches=1, capacity=64)
    run.add_branches({0: [1]})
    with pytest.raises(ValueError, match=r"accepted: \[3\], allowed are the branches \[0\]"):
        run.decode({3: [1]})


def test_models_whose_keys_depend_on_a_prompts_length_or_on_later_tokens_are_refused():
    dynamic = RopeConfig("dynamic", factor=2.0, max_position_embeddings=32)
    with pytest.raises(ValueError, match="model: its rope_type is 'dynamic'"):
        CachedForward(random_model(model_config(rope=dynamic)))
    with pytest.raises(ValueError, match="model: LLaDAModelLM is a diffusion model"):
        CachedForward(random_model(model_config("LLaDAModelLM", mask_token_id=100)))
