"""A larger compiled program runs in the place of one that is not compiled yet."""

from dataclasses import replace

import pytest

from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.stand_ins import MOST_TIMES, MOST_USES, StandIns
from jaxinfer.speculative.proposer import RoundsShape
from tests.builders import make_engine, make_request, model_config, one_by_one, random_model, run_requests

LOOP, STEP = BatchShape(8, 0, 0, 64), BatchShape(8, 4, 64, 64)
PROGRAM, OTHER = object(), object()


@pytest.mark.parametrize(
    "wanted", [{"decode_rows": 4, "num_logits": 4}, {"pages_per_row": 8}, {"decode_rows": 1, "num_logits": 1}]
)
def test_a_larger_loop_stands_in(wanted):
    choose = StandIns({(PROGRAM, LOOP)})
    assert choose(PROGRAM, replace(LOOP, **wanted)) == LOOP


@pytest.mark.parametrize(
    "wanted",
    [
        replace(LOOP, decode_rows=16, num_logits=16),
        replace(LOOP, pages_per_row=128),
        replace(LOOP, decode_width=2),
        replace(LOOP, tail_words=1),
        replace(LOOP, block_size=4),
        replace(STEP, prefill_tokens=16),
        BatchShape.of_lanes(4, 64, 2),
    ],
)
def test_no_launch_of_another_kind_and_no_smaller_one_stands_in(wanted):
    assert StandIns({(PROGRAM, LOOP)})(PROGRAM, wanted) is wanted


def test_other_programs_do_not_stand_in():
    wanted = replace(LOOP, pages_per_row=8)
    assert StandIns({(OTHER, LOOP)})(PROGRAM, wanted) is wanted


def test_the_one_of_fewest_tokens_stands_in_and_the_wanted_one_as_soon_as_it_is_there():
    large = replace(LOOP, decode_rows=16, num_logits=16)
    compiled = {(PROGRAM, large), (PROGRAM, LOOP)}
    wanted = replace(LOOP, decode_rows=2, num_logits=2)
    choose = StandIns(compiled)
    assert choose(PROGRAM, wanted) == LOOP
    compiled.add((PROGRAM, wanted))
    assert choose(PROGRAM, wanted) == wanted


def test_a_program_that_computes_many_times_as_much_does_not_stand_in():
    few, many = (replace(STEP, prefill_tokens=tokens, decode_rows=0) for tokens in (64, 64 * MOST_TIMES))
    choose = StandIns({(PROGRAM, replace(many, prefill_tokens=many.prefill_tokens + 1))})
    assert choose(PROGRAM, few) is few
    assert StandIns({(PROGRAM, many)})(PROGRAM, few) == many


def test_what_was_wanted_often_is_compiled():
    choose, wanted = StandIns({(PROGRAM, LOOP)}), replace(LOOP, pages_per_row=8)
    assert [choose(PROGRAM, wanted) for _ in range(MOST_USES + 2)] == [LOOP] * MOST_USES + [wanted] * 2


def test_rounds_stand_in_for_rounds_with_as_many_drafts():
    small = replace(LOOP, decode_rows=2, num_logits=2)
    choose = StandIns({(PROGRAM, RoundsShape(LOOP, 5)), (PROGRAM, RoundsShape(LOOP, 9, 8))})
    assert choose(PROGRAM, RoundsShape(small, 5)) == RoundsShape(LOOP, 5)
    assert choose(PROGRAM, RoundsShape(small, 3)) == RoundsShape(small, 3)


def test_a_batch_that_shrinks_compiles_nothing_and_gets_its_tokens():
    model = random_model(model_config())

    def requests():
        return [make_request(str(i), [7 + i, 11, 13 + i], max_tokens=n) for i, n in enumerate((40, 30, 20, 4))]

    expected = one_by_one(make_engine(model), requests())
    core = make_engine(model)
    assert run_requests(core, requests()) == expected
    loops = [shape for program, shape in core.runner._executables if shape in core.buckets.all_loops()]
    assert [shape.decode_rows for shape in loops] == [4]
