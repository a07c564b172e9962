"""Measured expansions of plans: ratios of steps and of time, and the questions that are asked."""

import itertools

from branching.expansion import comparison_table, planning_questions, summarise
from jaxinfer.limits import BRANCH_MODES


def row(alone: int, together: int, slow: list[float], fast: list[float], same: bool = True) -> dict:
    taken = {"steps": together, "seconds": fast, "same_tokens": same}
    return {
        "question": "?",
        "points": 5,
        "tokens": 150,
        "skeleton": {"steps": 50, "seconds": 1.0},
        "one_after_the_other": {"steps": alone, "seconds": slow},
        "at_once": dict.fromkeys(BRANCH_MODES, taken),
    }


def test_steps_are_summed_and_times_are_medians_of_pairs():
    rows = [row(150, 50, [4.0, 6.0, 9.0], [2.0, 2.0, 3.0]), row(250, 50, [4.0], [4.0], same=False)]
    for found in summarise(rows).values():
        assert (found["steps_one_after_the_other"], found["steps_at_once"], found["skeleton_steps"]) == (400, 100, 100)
        assert (found["fewer_steps"], found["fewer_steps_whole"]) == (4.0, 2.5)
        assert (found["less_time"], found["less_time_whole"]) == (2.5, (5 / 3 + 7 / 3) / 2)
        assert found["same_tokens"] == 1
    assert comparison_table(rows).row_count == len(BRANCH_MODES)


def test_questions_are_different_held_out_ones_and_enough():
    questions = list(itertools.islice(planning_questions(12), 24))
    assert len(questions) == len(set(questions)) == 24
    assert questions[:3] == list(itertools.islice(planning_questions(12), 3))
