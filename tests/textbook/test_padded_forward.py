"""Padded rounds give the answers of each branch alone and of the engine's ragged rows; planted bugs do not."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.textbook.alignment import AlignmentState
from tests.branching.stories import Rounds, Story, random_rounds, rounds_of_every_kind
from tests.builders import model_config, random_model
from tests.oracle import next_token_logits
from tests.programs.lane_steps import LaneSteps
from tests.textbook.padded_forward import Bug, PaddedBranches, no_bug

TOLERANCE = 1e-4  # of logits that are about 10


@cache
def the_model():
    return random_model(model_config())


def greatest_error(story: Story, rounds: Rounds, bug: Bug = no_bug) -> float:
    """How far logits of padded rounds are from those of each branch alone, at most."""
    padded, errors = PaddedBranches(the_model(), story.prefix), [0.0]
    for grow in rounds:
        for branch, logits in padded.run(grow(), bug).items():
            alone = next_token_logits(the_model(), story.sequences[branch], prompt_len=1)
            errors.append(float(np.abs(logits - alone).max()))
    return max(errors)


@settings(max_examples=30)
@given(random_rounds())
def test_padded_rounds_answer_as_each_branch_does_alone(story_and_rounds):
    assert greatest_error(*story_and_rounds) < TOLERANCE


def holes_of_earlier_rounds_are_seen(state: AlignmentState) -> tuple[np.ndarray, np.ndarray]:
    mask = state.attention_mask.copy()
    mask[:, : state.cache_length - state.input_ids.shape[1]] = True
    return state.position_ids, replace(state, attention_mask=mask).query_mask


def holes_of_this_round_are_seen(state: AlignmentState) -> tuple[np.ndarray, np.ndarray]:
    mask = state.attention_mask.copy()
    mask[:, state.cache_length - state.input_ids.shape[1] :] = True
    return state.position_ids, replace(state, attention_mask=mask).query_mask


def positions_are_physical(state: AlignmentState) -> tuple[np.ndarray, np.ndarray]:
    own = np.arange(state.cache_length)[state.cache_length - state.input_ids.shape[1] :]
    return np.broadcast_to(own, state.input_ids.shape), state.query_mask


def positions_count_the_rounds_padding(state: AlignmentState) -> tuple[np.ndarray, np.ndarray]:
    return state.position_ids + state.padding_lengths[:, None], state.query_mask


def tokens_see_what_comes_after_them(state: AlignmentState) -> tuple[np.ndarray, np.ndarray]:
    return state.position_ids, state.padding_mask[:, :, None] & state.attention_mask[:, None]


@pytest.mark.parametrize(
    "bug",
    [
        holes_of_earlier_rounds_are_seen,
        holes_of_this_round_are_seen,
        positions_are_physical,
        positions_count_the_rounds_padding,
        tokens_see_what_comes_after_them,
    ],
)
def test_the_comparison_notices_a_planted(bug):
    assert greatest_error(*rounds_of_every_kind()) < TOLERANCE
    assert greatest_error(*rounds_of_every_kind(), bug) > 100 * TOLERANCE


def test_the_engines_ragged_row_of_all_branches_answers_as_the_padded_rectangle():
    shape = BatchShape(1, 1, 16, 16, decode_width=8)
    steps = LaneSteps(the_model(), shape, page_size=4, num_pages=24)
    lane = steps.lane(6)
    story = Story([lane.tokens[index] for index in range(6)], 3, np.random.default_rng(2))
    padded = PaddedBranches(the_model(), story.prefix)
    lane.fork(3, first_takes_boundary=True)
    for counts in ((3, 1, 2), (1, 0, 2), (2, 4, 1)):
        state = story.decode(*counts)
        grown = [story.sequences[b][len(story.sequences[b]) - n :] for b, n in enumerate(counts)]
        queries = [query for branch, tokens in enumerate(grown) for query in lane.extend(tokens, branch)]
        assert len(queries) == state.padding_mask.sum() < state.padding_mask.size
        (ragged,) = steps.run([(lane, queries)])
        last = {query.branch: logits for query, logits in zip(queries, ragged, strict=True)}
        for branch, logits in padded.run(state).items():
            np.testing.assert_allclose(last[branch], logits, rtol=TOLERANCE, atol=TOLERANCE)
