"""Random lives of groups: whatever is added, stepped and aborted, members get their tokens and pages stay right."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.limits import BRANCH_MODES
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import Rounds, RowKind
from tests.branching.builders import make_group
from tests.branching.lane_device import GroupSimulation
from tests.builders import make_request
from tests.engine.fake_device import expected_output

PAGE_SIZE = 4
ENDING = (3,)
STRATEGIES = (
    *(Rounds(RowKind.DECODE, most=most) for most in (1, 4, 16)),
    *(Rounds(RowKind.VERIFICATION, most=most, most_tokens=5, least_tokens=1, plain=Rounds()) for most in (1, 3)),
)
members = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 24)), min_size=1, max_size=6)


class BranchLife(RuleBasedStateMachine):
    """Rules are what a user or the engine may do; as in an engine, at most one launch is in flight when the next is
    built."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = GroupSimulation()
        self.groups: list[RequestGroup] = []
        self.requests: list[Request] = []  # members and others
        self.ended: set[str] = set()  # from outside

    @initialize(
        num_pages=st.integers(4, 12) | st.integers(8, 24),
        budget=st.integers(6, 24),
        rows=st.integers(1, 5),
        shorter=st.integers(0, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        rounds=st.sampled_from(STRATEGIES),
        caching=st.booleans(),
    )
    def make(self, num_pages, budget, rows, shorter, policy, rounds, caching):
        number = itertools.count()

        def tokens_of_round() -> int:
            return rounds.least_tokens + next(number) * 7919 % (rounds.most_tokens - rounds.least_tokens + 1)

        self.max_len = max(4, num_pages - shorter) * PAGE_SIZE
        self.sim = GroupSimulation(
            num_pages=num_pages, page_size=PAGE_SIZE, budget=budget, rows=rows, max_len=self.max_len, policy=policy,
            rounds=rounds, tokens_of_round=tokens_of_round, caching=caching,
        )  # fmt: skip

    @precondition(lambda self: sum(bool(group.num_unfinished) for group in self.groups) < 3)
    @rule(
        stem=st.integers(0, 1),
        length=st.integers(4, 20) | st.integers(1, 26),
        each=members,
        mode=st.sampled_from(BRANCH_MODES),
        max_parallel=st.none() | st.integers(1, 4),
        is_predicted=st.booleans(),
        priority=st.integers(0, 2),
        stream=st.booleans(),
        skips=st.booleans(),
    )
    def add_group(self, stem, length, each, mode, max_parallel, is_predicted, priority, stream, skips):
        # Prefixes begin alike, and are those of other requests too.
        length = min(length, self._longest - 2)
        prefix, room, number = [100 * stem + i for i in range(length)], self._longest - length, len(self.requests)
        suffixes = [[1000 * (number + i) + j for j in range(min(count, room - 1))] for i, (count, _) in enumerate(each)]
        most = [min(max_tokens, room - len(suffix)) for suffix, (_, max_tokens) in zip(suffixes, each, strict=True)]
        group = make_group(
            f"group {number}", prefix, suffixes, page_size=PAGE_SIZE, branch_mode=mode, max_parallel=max_parallel,
            predicted=most if is_predicted else None, each=[{"max_tokens": more} for more in most], priority=priority,
            eos_token_ids=ENDING, stream=stream, skip_reading_prefix_cache=skips,
        )  # fmt: skip
        self.groups.append(self.sim.add_group(group))
        self.requests += group.members

    @precondition(lambda self: sum(not request.is_finished for request in self.requests) < 3)
    @rule(stem=st.integers(0, 1), length=st.integers(1, 40), max_tokens=st.integers(1, 40), priority=st.integers(0, 2))
    def add(self, stem, length, max_tokens, priority):
        length = min(length, self._longest - 1)
        most = min(max_tokens, self._longest - length)
        prompt = [100 * stem + i for i in range(length)]
        request = make_request(
            f"{len(self.requests)}", prompt, max_tokens=most, priority=priority, eos_token_ids=ENDING
        )
        self.requests.append(self.sim.add(request))

    @property
    def _longest(self) -> int:
        return min(self.max_len, self.sim.scheduler.kv.num_slots)

    @precondition(lambda self: len(self.sim.in_flight) < 2)
    @rule()
    def launch(self):
        must_run = self.sim.scheduler.has_unfinished_requests() and not self.sim.in_flight
        output = self.sim.launch()
        assert output.requests or not must_run, "a step did nothing for unfinished requests"

    @precondition(lambda self: self.sim.in_flight)
    @rule()
    def land(self):
        for landing in self.sim.land():
            assert landing.request.request_id not in self.ended

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 8))
    def go_on(self, count):
        for _ in range(count):
            if len(self.sim.in_flight) < 2:
                self.launch()
            if self.sim.in_flight:
                self.land()
            self.as_many_members_run_as_may()

    @precondition(lambda self: sum(not request.is_finished for request in self.requests) > 4)
    @rule(
        which=st.integers(0, 9),
        status=st.sampled_from([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED]),
    )
    def end_one_from_outside(self, which, status):
        unfinished = [request for request in self.requests if not request.is_finished]
        self._end([unfinished[which % len(unfinished)]], status)

    @precondition(lambda self: sum(bool(group.num_unfinished) for group in self.groups) > 2)
    @rule(which=st.integers(0, 9), at_once=st.booleans())
    def abort_a_group(self, which, at_once):
        groups = [group for group in self.groups if group.num_unfinished]
        group = groups[which % len(groups)]
        unfinished = [member for member in group.members if not member.is_finished]
        for some in [unfinished] if at_once else [[member] for member in unfinished]:
            self._end(some, RequestStatus.FINISHED_ABORTED)

    def _end(self, requests: list[Request], status: RequestStatus) -> None:
        self.sim.end(requests, status)
        self.ended.update(request.request_id for request in requests)

    @rule()
    def forget_what_is_cached(self):
        if self.sim.scheduler.kv.cache is not None:
            self.sim.scheduler.kv.cache.clear()

    @invariant()
    def every_page_is_in_one_state(self):
        self.sim.scheduler.check_integrity()

    @invariant()
    def as_many_members_run_as_may(self):
        scheduler = self.sim.scheduler
        for group in self.groups:
            running = [request for request in scheduler.running if request.group is group and not request.is_trunk]
            assert len(running) <= group.max_parallel
            assert sum(request.trunk is not None for request in running) == group.num_running
            unfinished = sum(not member.is_finished for member in group.members)
            assert unfinished == group.num_unfinished
            # Those that may run wait or run, and no more.
            assert unfinished - len(group.pending) == min(unfinished, group.max_parallel)
        assert scheduler.num_sharing_lanes == sum(request.shares_lane for request in scheduler.running)

    @invariant()
    def tokens_are_those_of_each_sequence_alone(self):
        for request in self.requests:
            got, most = request.output_token_ids, request.sampling_params.max_tokens
            expected = expected_output(request.prompt_token_ids, most, ENDING)
            if request.is_finished and request.request_id not in self.ended:
                assert got == expected
            else:
                assert got == expected[: len(got)]

    @invariant()
    def a_trunk_has_pages_only_for_members_that_are_left(self):
        scheduler = self.sim.scheduler
        trunks = [group.trunk for group in self.groups if group.trunk is not None and not group.num_unfinished]
        assert not any(trunk.pages or trunk in (*scheduler.running, *scheduler.trunks.held) for trunk in trunks)

    def teardown(self) -> None:
        self.sim.drain(max_steps=2000)
        assert all(request.is_finished and not request.pages for request in self.requests)
        self.tokens_are_those_of_each_sequence_alone()
        self.as_many_members_run_as_may()
        self.a_trunk_has_pages_only_for_members_that_are_left()
        allocator = self.sim.scheduler.kv.allocator
        assert allocator.num_free + allocator.num_cached == allocator.num_pages
        assert self.sim.scheduler.kv.num_available == allocator.num_pages, "a lock was not released"


class TestBranchLife(BranchLife.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.slow
class TestLongBranchLife(BranchLife.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80)
