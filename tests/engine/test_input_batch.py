"""The arrays of a step against a slow recomputation, token by token."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.programs.batch_layout import BatchShape, StepBatch, unpack
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.decode_loop import DecodeLoop
from jaxinfer.programs.seats import ENDED, Seats, read_seats
from jaxinfer.programs.stand_ins import StandIn
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler import SchedulerOutput
from tests.builders import make_request
from tests.engine.fake_device import VOCAB, Simulation

PAGE_SIZE, NUM_PAGES, ROWS, BUDGET, MAX_LEN = 4, 30, 5, 24, 80
NUM_SLOTS = NUM_PAGES * PAGE_SIZE


def random_sampling(rng: np.random.Generator) -> dict:
    return {
        "temperature": float(rng.choice([0.0, 0.7])),
        "top_k": int(rng.choice([-1, 0, 5])),
        "top_p": float(rng.choice([1.0, 0.9])),
        "min_p": float(rng.choice([0.0, 0.1])),
        "request_key": (int(rng.integers(2**32)), int(rng.integers(2**32))),
        "eos_token_ids": rng.choice(VOCAB, 3, replace=False).tolist(),
    }


ROUNDS = (
    Rounds(RowKind.DECODE),
    Rounds(RowKind.DECODE, most=8),
    Rounds(RowKind.VERIFICATION, most=2, most_tokens=3, plain=Rounds()),
    Rounds(RowKind.BLOCK, most=2, most_tokens=4, least_tokens=0, plain=Rounds()),
)


class AnyRounds:
    """A strategy whose launches come in the shapes of decode loops."""

    program, programs, models, state = DecodeLoop(8), (), {}, {}

    def __init__(self, buckets: Buckets, rounds: Rounds) -> None:
        self.buckets, self.rounds = buckets, rounds

    def shape_for(self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool, stand_in: StandIn) -> BatchShape:
        assert not lanes
        return self.buckets.loop_for(decode_rows=rows, pages_per_row=pages_per_row)


def random_steps(seed: int, launches: int = 250):
    """(output, built batch, the seats as the device finds them) of a random life with preemptions, aborts and launches
    in flight."""
    rng = np.random.default_rng(seed)
    rounds = ROUNDS[seed]
    buckets = Buckets.from_limits(
        max_num_seqs=ROWS, max_num_batched_tokens=BUDGET, max_model_len=MAX_LEN, page_size=PAGE_SIZE
    )
    sizes = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "budget": BUDGET, "rows": ROWS}
    sim = Simulation(
        **sizes, prefill_room=buckets.prefill_room, policy=("fcfs", "priority")[seed % 2], rounds=rounds,
        tokens_of_round=lambda: int(rng.integers(rounds.least_tokens, rounds.most_tokens + 1)),
    )  # fmt: skip
    batch = InputBatch(buckets, AnyRounds(buckets, rounds), page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    requests: list[Request] = []
    for _ in range(launches):
        if rng.random() < 0.3:
            prompt = rng.integers(0, 1000, rng.integers(1, 50)).tolist()
            sizes = {"max_tokens": int(rng.integers(4, 25)), "priority": int(rng.integers(3))}
            requests.append(sim.add(make_request(str(len(requests)), prompt, **sizes, **random_sampling(rng))))
        unfinished = [request for request in requests if not request.is_finished]
        if unfinished and rng.random() < 0.05:
            sim.end([unfinished[rng.integers(len(unfinished))]], RequestStatus.FINISHED_ABORTED)
        seats = dict(sim.device.seats)
        output = sim.launch()
        entered = [request for request in output.requests if request.request_id in output.enters]
        seats |= {request: (request.token_ids[-1], request.num_tokens) for request in entered}
        batch.remove(output.finished_req_ids | output.preempted_req_ids)
        if output.requests:
            yield output, batch.build(output), seats
        while len(sim.in_flight) > rng.integers(0, 3):
            sim.land()
    assert sim.scheduler.num_preemptions > 3


@dataclass(frozen=True)
class Launch:
    """A batch, as it was packed and as the device completes it, and {request id: facts that must hold of it}."""

    facts: dict[str, dict]
    built: BuiltBatch
    completed: StepBatch


@pytest.fixture(scope="module", params=range(4))
def life(request) -> list[Launch]:
    launches = []
    for output, built, seats in random_steps(request.param):
        token, length = np.zeros((2, ROWS), np.int32)
        for row, (latest, tokens) in seats.items():
            if row in output.requests:
                token[row.seat], length[row.seat] = ENDED if latest is None else latest, tokens
        batch = unpack(jnp.asarray(built.packed.buffer), built.packed.shape)
        completed = read_seats(
            batch,
            Seats(*map(jnp.asarray, (token, token, length))),
            page_size=PAGE_SIZE,
            num_slots=NUM_SLOTS,
        )
        launches.append(Launch(facts_of(output, seats), built, jax.tree.map(np.asarray, completed)))
    return launches


def facts_of(output: SchedulerOutput, seats: dict[Request, tuple[int | None, int]]) -> dict[str, dict]:
    """What must be true of each request's row when its launch begins, recomputed one token at a time."""
    facts = {}
    for at, (request, kind) in enumerate(zip(output.requests, output.kinds, strict=True)):
        if kind is RowKind.PROMPT_CHUNK:
            end = output.num_computed[at] + output.num_tokens[at]
            ids = {index: request.token_ids[index] for index in range(output.num_computed[at], end)}
        else:
            latest, end = seats[request]
            ids = {} if latest is None else {end - 1: latest}
        tokens = [
            {
                "token_ids": token,
                "positions": index,
                "lengths": max(index + 1, len(request.prompt_token_ids)),
                "slot_mapping": request.pages[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE,
                "limit": index,
                "branch": -1,
            }
            for index, token in ids.items()
        ]
        params = request.sampling_params
        facts[request.request_id] = {
            "at": at,
            "kind": kind,
            "tokens": tokens,
            "pages": list(request.pages),
            "row": dict.fromkeys(("kv_len", "trunk_len", "tail_start"), end if ids else 0),
            "sample_position": end if ids else -1,
            "logits": {
                "temperature": np.float32(params.temperature),
                "top_k": max(params.top_k, 0),
                "top_p": np.float32(params.top_p),
                "min_p": np.float32(params.min_p),
                "seat": request.seat if output.most_tokens[at] else ROWS,
                "max_len": request.max_total_tokens,
            },
            "request_key": request.request_key,
            "ending": request.ending_token_ids,
            "num_steps": output.rounds_of[at] if output.rounds_of else 1,
        }
    return facts


def tokens_of(built: BuiltBatch, row: int) -> range:
    start = built.packed["query_start_loc"]
    return range(start[row], start[row + 1])


def test_each_token_has_its_id_position_slot_and_limit(life):
    idle = 0
    for launch in life:
        for fact in launch.facts.values():
            row = launch.built.rows[fact["at"]]
            where = tokens_of(launch.built, row)
            if not fact["tokens"]:
                idle += 1
                continue
            assert len(where) == len(fact["tokens"])
            for t, token in zip(where, fact["tokens"], strict=True):
                assert {name: getattr(launch.completed, name)[t] for name in token} == token
                assert launch.completed.row[t] == row
    assert idle > 0, "no row had ended before the host knew"


def test_each_row_has_its_lengths_and_its_pages_and_how_far_they_reach(life):
    for launch in life:
        for fact in launch.facts.values():
            row, pages = launch.built.rows[fact["at"]], fact["pages"]
            assert {name: getattr(launch.completed, name)[row] for name in fact["row"]} == fact["row"]
            assert launch.built.packed["page_table"][row, : len(pages)].tolist() == pages
            assert launch.built.packed["capacity"][row] == len(pages) * PAGE_SIZE


def test_each_row_is_sampled_at_its_last_token_with_its_own_parameters(life):
    for launch in life:
        packed = launch.built.packed
        for fact in launch.facts.values():
            row, place = launch.built.rows[fact["at"]], launch.built.logits_rows[fact["at"]]
            assert packed["logits_index"][place] == tokens_of(launch.built, row)[-1]
            assert {name: packed[name][place] for name in fact["logits"]} == fact["logits"]
            assert tuple(packed["request_key"][place]) == fact["request_key"]
            assert launch.completed.samples.sampling.sample_position[place] == fact["sample_position"]


def test_each_row_has_the_tokens_that_end_it(life):
    for launch in life:
        for fact in launch.facts.values():
            ending = launch.built.packed["ending_token_ids"][launch.built.logits_rows[fact["at"]]].tolist()
            assert sorted(token for token in ending if token >= 0) == sorted(fact["ending"])
            assert launch.built.packed["num_steps"][launch.built.rows[fact["at"]]] == fact["num_steps"]


def test_some_rows_are_taken_from_seats_and_some_launches_have_several_rounds(life, request):
    seated = sum((launch.built.packed["row_seat"] >= 0).sum() for launch in life)
    several = sum((launch.built.packed["num_steps"] > 1).any() for launch in life)
    assert seated > 10
    assert (several > 0) == (ROUNDS[request.node.callspec.params["life"]].most > 1)


def test_no_two_samples_go_to_one_seat(life):
    for launch in life:
        seats = [seat for seat in launch.built.packed["seat"].tolist() if seat < ROWS]
        assert len(set(seats)) == len(seats)


def test_no_two_requests_share_a_row(life):
    for launch in life:
        assert len(set(launch.built.rows.tolist())) == len(launch.facts)
        assert len(set(launch.built.logits_rows.tolist())) == len(launch.facts)


def test_rows_in_their_seats_come_first_in_rows_of_width_one(life):
    for launch in life:
        shape = launch.built.packed.shape
        for fact in launch.facts.values():
            is_first = launch.built.rows[fact["at"]] < shape.decode_rows
            assert is_first == (fact["kind"] is not RowKind.PROMPT_CHUNK)
        starts = launch.built.packed["query_start_loc"]
        assert starts[: shape.decode_rows + 1].tolist() == list(range(shape.decode_rows + 1))
        assert np.all(np.diff(starts) >= 0)


def test_padding_tokens_write_nowhere_and_see_nothing(life):
    padded = 0
    for launch in life:
        busy = [fact for fact in launch.facts.values() if fact["tokens"]]
        used = {t for fact in busy for t in tokens_of(launch.built, launch.built.rows[fact["at"]])}
        rest = [t for t in range(launch.built.packed.shape.num_tokens) if t not in used]
        slots = launch.completed.slot_mapping
        assert np.all(slots[rest] >= NUM_SLOTS)
        assert np.all(launch.completed.limit[rest] == -1)
        assert len(set(slots.tolist())) == len(slots), "two tokens would be written to one slot"
        padded += len(rest)
    assert padded > 100


def test_padding_rows_are_empty(life):
    padded = 0
    for launch in life:
        packed, used = launch.built.packed, set(launch.built.rows.tolist())
        rest = [row for row in range(packed.shape.num_rows) if row not in used]
        assert len(launch.facts) + len(rest) == packed.shape.num_rows
        assert not launch.completed.kv_len[rest].any()
        unsampled = [row for row in range(packed.shape.num_logits) if row not in launch.built.logits_rows]
        assert not packed["temperature"][unsampled].any() and np.all(packed["seat"][unsampled] == ROWS)
        padded += len(rest)
    assert padded > 50


def test_a_request_that_ran_under_a_used_id_gets_its_own_parameters():
    sim = Simulation(rows=2, page_size=PAGE_SIZE)
    buckets = Buckets.from_limits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, page_size=PAGE_SIZE)
    batch = InputBatch(buckets, AnyRounds(buckets, Rounds()), page_size=PAGE_SIZE, num_pages=64)
    for temperature in (0.5, 0.25):
        sim.add(make_request("same", [1, 2, 3], max_tokens=1, temperature=temperature))
        output = sim.launch()
        batch.remove(output.finished_req_ids | output.preempted_req_ids)
        built = batch.build(output)
        assert built.packed["temperature"][built.logits_rows[0]] == np.float32(temperature)
        sim.land()


def test_a_row_of_whose_page_no_launch_has_told_is_no_launch():
    sim = Simulation(rows=2, page_size=PAGE_SIZE)
    buckets = Buckets.from_limits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, page_size=PAGE_SIZE)
    batch = InputBatch(buckets, AnyRounds(buckets, Rounds()), page_size=PAGE_SIZE, num_pages=64)
    sim.add(make_request("a", [1, 2, 3, 4], max_tokens=9))
    batch.build(sim.launch())
    output = sim.launch()
    assert output.new_pages == [[1]]
    with pytest.raises(AssertionError, match="a row has no page for its tokens"):
        batch.build(replace(output, new_pages=[[]]))
    batch.build(output)


def test_the_next_batch_of_the_same_rows_is_one_of_its_own():
    """Most batches are copied from the one before: with new pages, without what its launch has written, and not after
    other requests have taken the seats."""
    sim = Simulation(rows=2, page_size=PAGE_SIZE)
    buckets = Buckets.from_limits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, page_size=PAGE_SIZE)
    batch = InputBatch(buckets, AnyRounds(buckets, Rounds()), page_size=PAGE_SIZE, num_pages=64)
    sent: list[tuple[BuiltBatch, np.ndarray]] = []
    for temperature in (0.5, 0.25):
        for name in ("a", "b"):
            sim.add(make_request(f"{name}{temperature}", [1, 2, 3], max_tokens=9, temperature=temperature))
        num_pages = set()
        while sim.scheduler.has_unfinished_requests():
            output = sim.launch()
            batch.remove(output.finished_req_ids | output.preempted_req_ids)
            built = batch.build(output)
            if output.num_rounds:
                packed = built.packed
                assert packed["temperature"].tolist() == [temperature] * 2 and packed["wants_logprobs"] == 0
                for row, request in enumerate(output.requests):
                    assert packed["page_table"][row, : len(request.pages)].tolist() == request.pages
                    assert packed["capacity"][row] == PAGE_SIZE * len(request.pages)
                    num_pages.add(len(request.pages))
                packed["wants_logprobs"][...] = 1  # as a launch does whose rows want them
                sent.append((built, packed.buffer.copy()))
            sim.land()
        assert len(num_pages) == 3
    assert len(sent) == 16
    for built, buffer in sent:  # the device may read a buffer at any time
        np.testing.assert_array_equal(built.packed.buffer, buffer)
