"""Random lives of a scheduler: whatever is added, stepped, aborted and stopped, pages and outputs stay right."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerOutput
from tests.builders import make_request
from tests.engine.fake_device import Simulation, expected_output

PAGE_SIZE = 4
ENDING = (3, 7)
# One token after the other; and strategies whose launches land an unpredictable number of tokens.
STRATEGIES = (
    *(Rounds(RowKind.DECODE, most=most) for most in (1, 4, 16)),
    *(Rounds(RowKind.VERIFICATION, most=most, most_tokens=5, least_tokens=1, plain=Rounds()) for most in (1, 3)),
    *(Rounds(RowKind.BLOCK, most=most, most_tokens=4, least_tokens=0, plain=Rounds()) for most in (1, 3)),
)


class SchedulerLife(RuleBasedStateMachine):
    """Rules are what a user or the engine may do: launches and landings in any order, up to two launches ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation()
        self.requests: list[Request] = []
        self.ended: set[str] = set()  # from outside

    @initialize(
        num_pages=st.integers(4, 24),
        budget=st.integers(4, 24),
        rows=st.integers(1, 4),
        prefill_rows=st.integers(1, 4),
        room_of_a_decode=st.integers(0, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        rounds=st.sampled_from(STRATEGIES),
        caching=st.booleans(),
        beside=st.sampled_from([None, lambda most: most, lambda most: most // 2, lambda most: min(most, 1)]),
    )
    def make(self, num_pages, budget, rows, prefill_rows, room_of_a_decode, policy, rounds, caching, beside):
        budget = max(budget, rows)

        number = itertools.count()

        def tokens_of_round() -> int:
            return rounds.least_tokens + next(number) * 7919 % (rounds.most_tokens - rounds.least_tokens + 1)

        def prefill_room(decodes: int, prefills: int) -> int:
            return max(1, budget - room_of_a_decode * decodes) if prefills <= prefill_rows else 0

        self.sim = Simulation(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            budget=budget,
            rows=rows,
            prefill_room=prefill_room,
            policy=policy,
            rounds=rounds,
            tokens_of_round=tokens_of_round,
            caching=caching,
            beside=beside,
        )

    @rule(
        stem=st.integers(0, 2),
        shared=st.integers(0, 40),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
        stream=st.booleans(),
    )
    def add(self, stem, shared, length, max_tokens, priority, stream):
        # Prompts begin alike, part at any point, and may be the same.
        prompt = [(100 * stem + i + (1000 if i >= shared else 0) * len(self.requests)) for i in range(length)]
        self.add_prompt(prompt, max_tokens, priority, stream)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), dropped=st.integers(0, 3), length=st.integers(0, 9), max_tokens=st.integers(1, 30))
    def follow_up(self, data, dropped, length, max_tokens):
        """A turn after what a request has come to, its last tokens perhaps left out."""
        before = data.draw(st.sampled_from(self.requests)).token_ids
        history = before[: max(1, len(before) - dropped)]
        self.add_prompt([*history, *range(500, 500 + length)], max_tokens, priority=0, stream=False)

    def add_prompt(self, prompt, max_tokens, priority, stream):
        name, length = str(len(self.requests)), len(prompt)
        options = {"priority": priority, "eos_token_ids": ENDING, "stream": stream}
        request = make_request(name, prompt, max_tokens=max_tokens, **options)
        if length + max_tokens > self.sim.scheduler.kv.allocator.num_pages * PAGE_SIZE:
            with pytest.raises(ValueError, match=f"'{name}' may grow to {length + max_tokens} tokens"):
                self.sim.add(request)
        else:
            self.requests.append(self.sim.add(request))

    @precondition(lambda self: len(self.sim.in_flight) < 3)
    @rule()
    def launch(self):
        scheduler = self.sim.scheduler
        must_run = scheduler.has_unfinished_requests() and not self.sim.in_flight
        runnable = {r.request_id for r in scheduler.running if r.num_tokens_left > 0}
        launches = self.sim.in_order(self.sim.launch())
        limits, rounds = scheduler.limits, self.sim.rounds
        for output in launches:
            self.check_launch(output)
        if len(launches) == 2:
            kinds = [set(output.kinds) for output in launches]
            assert kinds == [{RowKind.PROMPT_CHUNK}, {rounds.kind}] and not launches[0].num_rounds
        known: set[str] = set()  # a request that runs in both is new in the first
        for output in launches:
            told = {new.req_id for new in output.scheduled_new_reqs} | output.resumed | output.enters
            assert not known & told
            known |= set(output.num_scheduled_tokens)
        rows = {
            request: (kind, count)
            for output in launches[::-1]
            for request, kind, count in zip(output.requests, output.kinds, output.num_tokens, strict=True)
        }
        assert sum(count for _, count in rows.values()) > 0 or not must_run
        chunks = [count for kind, count in rows.values() if kind is RowKind.PROMPT_CHUNK]
        decodes, prefills, tokens = len(rows) - len(chunks), len(chunks), sum(chunks)
        assert prefills == 0 or tokens <= limits.prefill_room(decodes, prefills)
        left = limits.max_num_batched_tokens - decodes - tokens
        as_decode = prefills == 0 or tokens <= limits.prefill_room(decodes + 1, prefills)
        as_chunk = tokens + 1 <= limits.prefill_room(decodes, prefills + 1)
        scheduled = {request.request_id for request in rows}
        for request in scheduler.running:
            if left and request.request_id in runnable - scheduled:
                assert not (as_decode if request.in_seat else as_chunk), "a running request was passed over"

    def check_launch(self, output: SchedulerOutput) -> None:
        """What holds of each launch alone."""
        limits, rounds, counts = self.sim.scheduler.limits, self.sim.rounds, output.num_tokens
        assert output.total_num_scheduled_tokens == sum(counts) <= limits.max_num_batched_tokens
        assert all(count > 0 for count in counts)
        assert len(counts) <= limits.max_num_seqs
        assert 0 <= output.num_rounds <= rounds.most
        if output.num_rounds:
            assert set(output.kinds) in ({rounds.kind}, {RowKind.DECODE})
        for request, most in zip(output.requests, output.most_tokens, strict=True):
            # Whatever the device lands, it has the pages for.
            assert not request.in_seat or request.num_known_tokens <= len(request.pages) * PAGE_SIZE + 1
            assert 0 <= most <= request.num_in_flight
        scheduled = set(output.num_scheduled_tokens)
        assert len(scheduled) == len(counts) and not scheduled & output.preempted_req_ids
        told = [new.req_id for new in output.scheduled_new_reqs] + output.scheduled_cached_reqs.req_ids
        assert sorted(told) == sorted(scheduled)

    @precondition(lambda self: self.sim.in_flight)
    @rule()
    def land(self):
        for landing in self.sim.land():
            assert landing.request.request_id not in self.ended
            assert landing.first < landing.last == landing.request.num_tokens

    @precondition(lambda self: any(not request.is_finished for request in self.requests))
    @rule(data=st.data(), status=st.sampled_from([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED]))
    def end_from_outside(self, data, status):
        request = data.draw(st.sampled_from([request for request in self.requests if not request.is_finished]))
        self.sim.end([request], status)
        self.ended.add(request.request_id)

    @rule()
    def forget_what_is_cached(self):
        if self.sim.scheduler.kv.cache is not None:
            self.sim.scheduler.kv.cache.clear()

    @invariant()
    def every_page_is_in_one_state(self):
        self.sim.scheduler.check_integrity()

    @invariant()
    def first_come_is_first_served(self):
        scheduler = self.sim.scheduler
        if scheduler.limits.scheduling_policy == "fcfs":
            arrivals = [request.arrival for request in (*scheduler.running, *scheduler.waiting)]
            assert arrivals == sorted(arrivals)

    @invariant()
    def tokens_are_those_of_the_request_alone(self):
        for request in self.requests:
            got, most = request.output_token_ids, request.sampling_params.max_tokens
            expected = expected_output(request.prompt_token_ids, most, ENDING)
            if request.is_finished and request.request_id not in self.ended:
                assert got == expected
            else:
                assert got == expected[: len(got)]

    def teardown(self) -> None:
        self.sim.drain()
        assert all(request.is_finished and not request.pages for request in self.requests)
        self.tokens_are_those_of_the_request_alone()
        allocator = self.sim.scheduler.kv.allocator
        assert allocator.num_free + allocator.num_cached == allocator.num_pages
        assert self.sim.scheduler.kv.num_available == allocator.num_pages, "a lock was not released"


class TestSchedulerLife(SchedulerLife.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.slow
class TestLongSchedulerLife(SchedulerLife.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80)
