"""How many drafts are chosen, with made-up costs and acceptance."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.speculative.acceptance import Acceptance
from jaxinfer.speculative.cost_controller import CostController
from jaxinfer.speculative.costs import Estimate, Key, LaunchCosts
from jaxinfer.speculative.gamma import NO_SEAT, EntropyController, RoundsReport, TimedLaunch

SEATS, MOST = 8, 4


def bucket(rows: int, pages_per_row: int, num_drafts: int, num_nodes: int = 0) -> Key | None:
    if num_drafts and rows > 4:
        return None
    return (rows, pages_per_row, 1 if num_drafts == 0 else 3 if num_drafts < 3 else 5, num_nodes)


def made_up(plain: float, verification: float, draft: float) -> LaunchCosts:
    costs = LaunchCosts(bucket, Estimate(1.0, 0.1, 16.0))
    for rows in range(1, 5):
        costs.set((rows, 1, 1, 0), verification=plain, draft=0.0)
        for width in (3, 5):
            costs.set((rows, 1, width, 0), verification=verification, draft=draft)
    return costs


def report(accepted: list[int], *, wanted: int = MOST, seat: int = 0, entropy: float = 0.0) -> RoundsReport:
    """Rounds of one sequence, each with `wanted` drafts of which so many were accepted."""
    count = np.asarray(accepted)[:, None]
    return RoundsReport(
        seats=np.asarray([seat]),
        ran=np.ones_like(count, bool),
        wanted=np.asarray([wanted]),
        drafted=np.full_like(count, wanted),
        accepted=count,
        entropy=np.full(count.shape, entropy),
    )


def controller(*costs: float) -> CostController:
    return CostController(SEATS, {0: MOST}, made_up(*costs), accepted={0: 0.5})


def choice(control: CostController, rows: int = 1) -> int:
    return int(control.choose(np.arange(rows), 1).drafts.max())


def test_cheap_drafts_that_are_accepted_are_drafted_as_many_as_can_be():
    control = controller(1.0, 1.0, 0.01)
    control.observe(report([4] * 50))
    assert choice(control) == MOST


def test_where_drafts_cost_more_than_they_bring_nothing_is_drafted():
    control = controller(1.0, 1.0, 2.0)
    control.observe(report([4] * 50))
    assert choice(control) == 0


def test_rejected_drafts_are_given_up():
    control = controller(1.0, 1.2, 0.1)
    assert choice(control) > 0
    control.observe(report([0] * 50))
    assert choice(control) == 0


def test_the_number_maximises_tokens_per_second():
    rate, plain, verification, draft = 0.7, 1.0, 1.1, 0.15
    control = controller(plain, verification, draft)
    rng = np.random.default_rng(0)
    accepted = np.minimum(rng.geometric(1 - rate, 4000) - 1, MOST)
    control.observe(report(accepted.tolist()))
    speeds = [1 / plain] + [(1 - rate ** (n + 1)) / (1 - rate) / (verification + n * draft) for n in range(1, MOST + 1)]
    assert choice(control) == int(np.argmax(speeds)) > 1


def test_sequences_are_told_apart():
    control = controller(1.0, 1.2, 0.1)
    control.observe(report([0] * 60, seat=0))
    control.observe(report([4] * 60, seat=1))
    assert control.choose(np.asarray([0]), 1).drafts.max() == 0
    assert control.choose(np.asarray([1]), 1).drafts.max() == MOST
    control.enter(0)
    assert control.choose(np.asarray([0]), 1).drafts.max() > 0, "another sequence has the seat"


def test_batches_without_a_program_of_rounds_are_decoded_plainly():
    control = controller(1.0, 1.0, 0.01)
    assert choice(control, rows=4) > 0 and choice(control, rows=5) == 0
    assert control.would_draft(4, 1) and not control.would_draft(5, 1)


def test_after_rejections_a_small_share_of_time_goes_into_trying_again():
    control = controller(1.0, 1.2, 0.1)
    control.observe(report([0] * 200))
    tried = plain = 0
    for _ in range(10_000):
        if choice(control):
            tried += 1
            control.observe(report([0]))
        else:
            plain += 1
            control.timed(TimedLaunch(0, 1, 1, 1, 1.0))
    assert tried > 0 and tried * 1.3 < 0.03 * plain


def test_drafts_that_are_accepted_again_are_drafted_again():
    control = controller(1.0, 1.2, 0.1)
    control.observe(report([0] * 200))
    chosen = []
    for _ in range(8_000):
        chosen.append(choice(control))
        if chosen[-1]:
            control.observe(report([chosen[-1]] * 4, wanted=chosen[-1]))
        else:
            control.timed(TimedLaunch(0, 1, 1, 1, 1.0))
    assert set(chosen[-100:]) == {MOST}


def test_nothing_is_compiled_to_try_again():
    """A program that was never launched is tried only if it may be better than what is known."""
    costs = LaunchCosts(bucket, Estimate(1.0, 1.0, 16.0))
    costs.set((1, 1, 1, 0), verification=1.0, draft=0.0)
    costs.set((1, 1, 3, 0), verification=1.2, draft=0.1)
    control = CostController(SEATS, {0: MOST}, costs, accepted={0: 0.0})
    control.observe(report([0] * 200, wanted=2))
    chosen = set()
    for rows in [1] * 5_000 + [2] * 5_000:
        chosen.add((rows, choice(control, rows)))
        control.timed(TimedLaunch(0, rows, 1, 1, 1.0))
    assert {rows for rows, number in chosen if number} == {1}


def silent(rounds: RoundsReport) -> RoundsReport:
    """Return a copy of the report in which nothing was drafted."""
    return replace(rounds, drafted=0 * rounds.drafted, accepted=0 * rounds.accepted)


def test_rounds_in_which_nothing_is_drafted_bring_a_token_and_cost_a_plain_step():
    control = CostController(SEATS, {0: MOST}, made_up(1.0, 2.0, 0.0), drafts=0.5, accepted={0: 0.5})
    control.observe(silent(report([0] * 150)))
    control.observe(report([2] * 50))  # a quarter of all rounds, where two of four drafts are accepted
    found = control.acceptance[0].forecast(np.asarray([5]))
    assert found.any_drafts == pytest.approx(0.3, abs=0.05)
    assert found.tokens[MOST] == pytest.approx(1 + 2 * found.any_drafts, abs=0.15)
    another = np.asarray([5])
    assert control.choose(another, 1).drafts.max() >= 2, "1.6 tokens for the price of 1.3 steps"
    always = controller(1.0, 2.0, 0.0)
    always.observe(silent(report([0] * 150)))
    always.observe(report([2] * 50))
    assert always.choose(another, 1).drafts.max() == 0, "1.6 tokens for the price of 2 steps"


def test_the_time_of_rounds_without_drafts_is_not_taken_for_that_of_others():
    control = CostController(SEATS, {0: MOST}, made_up(1.0, 2.0, 0.0), drafts=0.5, accepted={0: 0.5})
    for _ in range(50):
        control.timed(TimedLaunch(4, 1, 1, rounds=4, seconds=3 * 1.0 + 2.0, rounds_without=3))
        control.timed(TimedLaunch(4, 1, 1, rounds=4, seconds=4.0, rounds_without=4))
    assert control.costs is not None and control.costs.seconds(1, 1, 4) == pytest.approx(2.0)


def test_rounds_after_a_sequence_has_ended_say_nothing():
    found = Acceptance(SEATS, MOST, drafts=0.9, accepted=0.9)
    before = found.of_all()
    rounds = report([0] * 100)
    found.observe(replace(rounds, ran=np.zeros_like(rounds.ran)))
    assert np.array_equal(found.of_all(), before)


def test_costs_that_were_not_measured_are_estimated_in_the_unit_of_those_that_were():
    costs = LaunchCosts(bucket, Estimate(target=10.0, drafter=1.0, knee=16.0))
    costs.observe(1, 1, 0, seconds=0.017)  # 10 * (1 + 1 / 16) units
    unit = 0.017 / 10.625
    assert costs.seconds(1, 1, 0) == pytest.approx(0.017)
    assert costs.seconds(2, 1, 4) == pytest.approx(unit * (10 * (1 + 10 / 16) + 4 * (1 + 2 / 16)))


def test_running_launches_correct_what_was_measured():
    costs = made_up(1.0, 1.2, 0.1)
    for _ in range(60):
        costs.observe(2, 1, 4, seconds=3.2)
    assert costs.seconds(2, 1, 4) == pytest.approx(3.2, rel=0.02)
    assert costs.seconds(1, 1, 4) == pytest.approx(1.6)


def test_one_slow_launch_does_not_count_for_much():
    costs = made_up(1.0, 1.2, 0.1)
    costs.observe(2, 1, 4, seconds=100.0, rounds=4)
    assert costs.seconds(2, 1, 4) == pytest.approx(1.6 * 1.2, rel=0.03)


def test_what_a_launch_takes_besides_belongs_to_all_its_rounds():
    """Sequences end in the middle of launches: short ones do not make every round look as dear as they are."""
    costs = LaunchCosts(bucket, Estimate(target=10.0, drafter=1.0, knee=16.0))
    for rounds in (16, 1, 16, 16, 1, 16) * 20:
        costs.observe(1, 1, 0, seconds=(0.006 + 0.0015 * rounds) / rounds, rounds=rounds)
    assert costs.seconds(1, 1, 0) == pytest.approx(0.0015 + 0.006 * 6 / 66, rel=0.1)


def test_plain_decoding_is_tried_again_where_drafts_seem_better():
    """A first impression that was wrong does not stay."""
    control = controller(2.0, 2.0, 0.1)  # plain steps seem to take twice as long as they do
    control.observe(report([2] * 200))
    plain, seconds = 0, 0.0
    for _ in range(4_000):
        number = choice(control)
        if number:
            took = 4 * (2.0 + number * 0.1)
            control.timed(TimedLaunch(number, 1, 1, 4, took))
            control.observe(report([min(2, number)], wanted=number))
        else:
            took = 16 * 1.0
            plain += 1
            control.timed(TimedLaunch(0, 1, 1, 16, took))
        seconds += took
        if plain == 1 and number == 0:
            assert took < 0.03 * seconds, "trying again takes little time"
    assert control.costs is not None and control.costs.seconds(1, 1, 0) == pytest.approx(1.0, rel=0.1)


def test_a_drafter_in_doubt_drafts_less_by_entropy():
    control = EntropyController(SEATS, 1000, gamma_min=1, gamma_max=MOST)
    assert control.choose(np.asarray([3]), 1).drafts.tolist() == [MOST]
    control.observe(report([1], seat=3, entropy=math.log(1000)))
    assert control.choose(np.asarray([2, 3]), 1).drafts.tolist() == [MOST, 1]
    control.observe(report([1], seat=3, entropy=0.0))
    assert control.choose(np.asarray([3]), 1).drafts.tolist() == [MOST]
    control.observe(report([1], seat=3, entropy=3.0))
    control.enter(3)
    assert control.choose(np.asarray([3]), 1).drafts.tolist() == [MOST]


def test_a_sequence_without_a_seat_is_one_of_which_nothing_is_known():
    """A fork has no seat yet, and -1 is not the last one."""
    last = SEATS - 1
    known = Acceptance(SEATS, MOST, drafts=1.0, accepted=0.5)
    for _ in range(5):
        known.observe(report([0], seat=last))
    unknown = known.forecast_of_unknown(1).tokens
    np.testing.assert_allclose(known.forecast(np.asarray([NO_SEAT])).tokens, unknown)
    assert known.forecast(np.asarray([last])).tokens[-1] < unknown[-1]
    control = EntropyController(SEATS, 1000, gamma_min=1, gamma_max=MOST)
    control.observe(report([1], seat=last, entropy=math.log(1000)))
    assert control.choose(np.asarray([last, NO_SEAT]), 1).drafts.tolist() == [1, MOST]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["at first", "later"])
def test_one_shape_that_seemed_slow_does_not_make_all_others_seem_so(order):
    """A launch beside which something else kept the machine busy; what is not measured would never be tried."""
    unit, seconds = 0.001, [0.0, 0.0, 0.0]
    for index, rows in enumerate((1, 2, 4)):
        seconds[index] = unit * 10 * (1 + rows / 16) * (30 if index == 0 else 1)
    costs = LaunchCosts(bucket, Estimate(target=10.0, drafter=1.0, knee=16.0))
    for index in order:
        costs.observe((1, 2, 4)[index], 1, 0, seconds[index])
    assert costs.seconds(4, 1, 4) == pytest.approx(unit * (10 * (1 + 20 / 16) + 4 * (1 + 4 / 16)), rel=0.01)


def test_launches_tell_what_drafts_cost_and_what_their_verification_does():
    costs = LaunchCosts(bucket, Estimate(target=10.0, drafter=1.0, knee=16.0))
    for number in (3, 4) * 20:
        costs.observe(1, 1, number, seconds=0.02 + 0.001 * number)
    assert costs.seconds(1, 1, 4) == pytest.approx(0.024, rel=0.01)
    assert costs.seconds(1, 1, 3) == pytest.approx(0.023, rel=0.01)


def test_what_estimates_think_little_of_is_tried_once():
    """A verification of many rows may cost much less than its estimate."""
    costs = LaunchCosts(bucket, Estimate(target=10.0, drafter=1.0, knee=0.5))
    control = CostController(SEATS, {0: MOST}, costs, accepted={0: 0.6})
    for _ in range(40):
        number = choice(control, rows=4)
        control.timed(TimedLaunch(number, 4, 1, 4, 4 * (1.0 + (0.2 + 0.05 * number if number else 0.0))))
        if number:
            control.observe(report([3] * 4, wanted=number) if number == 4 else report([number] * 4, wanted=number))
    assert choice(control, rows=4) >= 3


@pytest.mark.parametrize("slow", [0, 1], ids=["plain steps", "rounds"])
def test_a_first_launch_beside_which_the_machine_was_busy_decides_nothing(slow):
    """It took five times as long as later ones do; without a second look its program would never run again."""
    costs = LaunchCosts(bucket, Estimate(target=10.0, drafter=1.0, knee=16.0))
    control = CostController(SEATS, {0: MOST}, costs, accepted={0: 0.9})
    seen = [0, 0]
    for _ in range(40):
        number = choice(control)
        is_first = seen[number > 0] == 0 and (number > 0) == slow
        seen[number > 0] += 1
        took = (1.2 + 0.02 * number if number else 1.0) * (5.0 if is_first else 1.0)
        control.timed(TimedLaunch(number, 1, 1, 4, 4 * took))
        if number:
            control.observe(report([number] * 4, wanted=number))
    assert choice(control) == MOST
    assert costs.seconds(1, 1, 0) == pytest.approx(1.0, rel=0.05)
    assert costs.seconds(1, 1, MOST) == pytest.approx(1.28, rel=0.05)


def test_what_is_accepted_at_one_depth_is_believed_of_the_next():
    known = Acceptance(SEATS, MOST, drafts=1.0, accepted=0.5)
    for _ in range(40):
        known.observe(report([1], wanted=1))
    assert known.of_all()[1:].min() > 0.85, "nothing was drafted at the other depths"
    for _ in range(40):
        known.observe(report([1], wanted=2))
    assert known.of_all()[2] < 0.15 < 0.85 < known.of_all()[1]


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize(
    ("verification", "draft"),
    [((1.0, 1.0), 0.02), ((1.1, 1.5), 0.1), ((1.2, 2.5), 0.02), ((1.1, 1.2), 0.5), ((2.0, 3.0), 0.3)],
)
def test_the_best_number_is_found_whatever_was_believed(verification, draft, rate, is_warm):
    """With costs that are far from the estimates, which say that drafts cost a tenth of a step."""
    most = 8

    def programs(rows: int, pages: int, num_drafts: int, num_nodes: int = 0) -> Key:
        return (rows, pages, 1 if num_drafts == 0 else 5 if num_drafts < 5 else 9, num_nodes)

    def seconds(number: int) -> float:
        return 0.01 * (1.0 if number == 0 else verification[number > 4] + number * draft)

    def tokens(number: int) -> float:
        return sum(rate**depth for depth in range(number + 1))

    rng = np.random.default_rng(0)
    costs = LaunchCosts(programs, Estimate(1.0, 0.1, 16.0))
    if is_warm:
        costs.set((1, 1, 1, 0), verification=0.01, draft=0.0)
        for width, one in zip((5, 9), verification, strict=True):
            costs.set((1, 1, width, 0), verification=0.01 * one, draft=0.01 * draft)
    control = CostController(SEATS, {0: most}, costs, accepted={0: 0.6})
    chosen = []
    for _ in range(400):
        number = choice(control)
        chosen.append(number)
        rounds = 1 if number else 8
        took = rounds * seconds(number) * float(rng.uniform(0.95, 1.1))
        control.timed(TimedLaunch(number, 1, 1, rounds, took))
        if number:
            control.observe(report([min(int(rng.geometric(1 - rate)) - 1, number)], wanted=number))
    speed = sum(map(tokens, chosen[200:])) / sum(map(seconds, chosen[200:]))
    best = max(tokens(number) / seconds(number) for number in range(most + 1))
    assert speed > 0.94 * best, "where two ways are as good but for a few percent, it may be either"
