"""The arrays of a step against a slow recomputation, token by token."""

import numpy as np
import pytest

from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.scheduler import SchedulerOutput
from jaxinfer.programs.buckets import Buckets
from tests.builders import make_request
from tests.engine.fake_device import VOCAB, Simulation

PAGE_SIZE, NUM_PAGES, ROWS, BUDGET, MAX_LEN = 4, 30, 5, 24, 80


def random_sampling(rng: np.random.Generator) -> dict:
    return {
        "temperature": float(rng.choice([0.0, 0.7])),
        "top_k": int(rng.choice([-1, 0, 5])),
        "top_p": float(rng.choice([1.0, 0.9])),
        "min_p": float(rng.choice([0.0, 0.1])),
        "request_key": (int(rng.integers(2**32)), int(rng.integers(2**32))),
        "eos_token_ids": rng.choice(VOCAB, 3, replace=False).tolist(),
    }


def random_steps(seed: int, launches: int = 150):
    """(scheduler's output, built batch) of a random life with preemptions, aborts and launches in flight."""
    rng = np.random.default_rng(seed)
    limits = {"policy": ("fcfs", "priority")[seed % 2], "max_decode_steps": (1, 8)[seed // 2 % 2]}
    buckets = Buckets.from_limits(
        max_num_seqs=ROWS, max_num_batched_tokens=BUDGET, max_model_len=MAX_LEN, page_size=PAGE_SIZE
    )
    sizes = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "budget": BUDGET, "rows": ROWS}
    sim = Simulation(**sizes, prefill_room=buckets.prefill_room, **limits)
    batch = InputBatch(buckets, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    requests: list[Request] = []
    for _ in range(launches):
        if rng.random() < 0.3:
            prompt = rng.integers(0, 1000, rng.integers(1, 50)).tolist()
            sizes = {"max_tokens": int(rng.integers(4, 25)), "priority": int(rng.integers(3))}
            requests.append(sim.add(make_request(str(len(requests)), prompt, **sizes, **random_sampling(rng))))
        unfinished = [request for request in requests if not request.is_finished]
        if unfinished and rng.random() < 0.05:
            sim.scheduler.finish_requests([unfinished[rng.integers(len(unfinished))]], RequestStatus.FINISHED_ABORTED)
        output = sim.launch()
        batch.remove(output.finished_req_ids | output.preempted_req_ids)
        if output.requests:
            yield output, batch.build(output)
        while len(sim.in_flight) > rng.integers(0, 3):
            sim.land()
    assert sim.scheduler.num_preemptions > 3


@pytest.fixture(scope="module", params=range(4))
def life(request) -> list[tuple[dict, BuiltBatch]]:
    """Each step as {request id: facts that hold when it is built} and the batch."""
    on_device: dict[str, int] = {}
    return [(facts_of(output, on_device), built) for output, built in random_steps(request.param)]


def facts_of(output: SchedulerOutput, on_device: dict[str, int]) -> dict[str, dict]:
    """What must be true of each request's row, recomputed from the request one token at a time.

    `on_device` says which token of a request its seat holds, and is brought up to date.
    """
    facts = {}
    for name in output.resumed:
        on_device.pop(name, None)  # it has a new seat
    for at, (request, count) in enumerate(zip(output.requests, output.num_tokens, strict=True)):
        end = request.num_computed_tokens - (output.num_steps - 1)
        tokens = []
        for index in range(end - count, end):
            page, offset = request.pages[index // PAGE_SIZE], index % PAGE_SIZE
            is_latest = count == 1 and on_device.get(request.request_id) == index
            assert is_latest or index < len(request.token_ids), "neither the host nor the device has this token"
            tokens.append(
                {
                    "token_ids": -1 - request.seat if is_latest else request.token_ids[index],
                    "positions": index,
                    "lengths": max(index + 1, len(request.prompt_token_ids)),
                    "slot_mapping": page * PAGE_SIZE + offset,
                    "limit": index,
                    "branch": -1,
                }
            )
        if output.samples[at]:
            on_device[request.request_id] = request.num_computed_tokens
        params = request.sampling_params
        facts[request.request_id] = {
            "at": at,
            "tokens": tokens,
            "pages": list(request.pages),
            "row": {"kv_len": end, "trunk_len": end, "tail_start": end},
            "logits": {
                "temperature": np.float32(params.temperature),
                "top_k": max(params.top_k, 0),
                "top_p": np.float32(params.top_p),
                "min_p": np.float32(params.min_p),
                "sample_position": end,
                "seat": request.seat if output.samples[at] else ROWS,
            },
            "request_key": request.request_key,
            "ending": request.ending_token_ids,
            "num_steps": output.num_steps,
        }
    return facts


def tokens_of(built: BuiltBatch, row: int) -> range:
    start = built.packed["query_start_loc"]
    return range(start[row], start[row + 1])


def test_each_token_has_its_id_position_slot_and_limit(life):
    for facts, built in life:
        for fact in facts.values():
            row = built.rows[fact["at"]]
            where = tokens_of(built, row)
            assert len(where) == len(fact["tokens"])
            for t, token in zip(where, fact["tokens"], strict=True):
                assert {name: built.packed[name][t] for name in token} == token
                assert built.packed["row"][t] == row


def test_each_row_has_its_lengths_and_its_pages(life):
    for facts, built in life:
        for fact in facts.values():
            row = built.rows[fact["at"]]
            assert {name: built.packed[name][row] for name in fact["row"]} == fact["row"]
            assert built.packed["page_table"][row, : len(fact["pages"])].tolist() == fact["pages"]


def test_each_row_is_sampled_at_its_last_token_with_its_own_parameters(life):
    for facts, built in life:
        for fact in facts.values():
            row = built.rows[fact["at"]]
            place = built.logits_rows[fact["at"]]
            assert built.packed["logits_index"][place] == tokens_of(built, row)[-1]
            assert {name: built.packed[name][place] for name in fact["logits"]} == fact["logits"]
            assert tuple(built.packed["request_key"][place]) == fact["request_key"]


def test_each_row_has_the_tokens_that_end_it(life):
    for facts, built in life:
        for fact in facts.values():
            ending = built.packed["ending_token_ids"][built.logits_rows[fact["at"]]].tolist()
            assert sorted(token for token in ending if token >= 0) == sorted(fact["ending"])
            assert built.packed["num_steps"] == fact["num_steps"]


def test_some_tokens_are_taken_from_the_device_and_some_launches_are_loops(life, request):
    from_device = sum((built.packed["token_ids"] < 0).sum() for _, built in life)
    loops = sum(built.packed["num_steps"] > 1 for _, built in life)
    assert from_device > 10
    assert (loops > 0) == (request.node.callspec.params["life"] >= 2)


def test_no_two_samples_go_to_one_seat(life):
    for _, built in life:
        seats = [seat for seat in built.packed["seat"].tolist() if seat < ROWS]
        assert len(set(seats)) == len(seats)


def test_no_two_requests_share_a_row(life):
    assert all(len(set(built.rows.tolist())) == len(facts) for facts, built in life)
    assert all(len(set(built.logits_rows.tolist())) == len(facts) for facts, built in life)


def test_rows_of_one_token_come_first_in_rows_of_width_one(life):
    for facts, built in life:
        shape = built.packed.shape
        for fact in facts.values():
            assert (built.rows[fact["at"]] < shape.decode_rows) == (len(fact["tokens"]) == 1)
        starts = built.packed["query_start_loc"]
        assert starts[: shape.decode_rows + 1].tolist() == list(range(shape.decode_rows + 1))
        assert np.all(np.diff(starts) >= 0)


def test_padding_tokens_write_nowhere_and_see_nothing(life):
    padded = 0
    for facts, built in life:
        used = {t for fact in facts.values() for t in tokens_of(built, built.rows[fact["at"]])}
        rest = [t for t in range(built.packed.shape.num_tokens) if t not in used]
        slots = built.packed["slot_mapping"]
        assert np.all(slots[rest] >= NUM_PAGES * PAGE_SIZE)
        assert np.all(built.packed["limit"][rest] == -1)
        assert len(set(slots.tolist())) == len(slots), "two tokens would be written to one slot"
        padded += len(rest)
    assert padded > 100


def test_padding_rows_are_empty(life):
    padded = 0
    for facts, built in life:
        used = set(built.rows.tolist())
        rest = [row for row in range(built.packed.shape.num_rows) if row not in used]
        assert len(facts) + len(rest) == built.packed.shape.num_rows
        assert not built.packed["kv_len"][rest].any()
        unsampled = [row for row in range(built.packed.shape.num_logits) if row not in built.logits_rows]
        assert not built.packed["temperature"][unsampled].any()
        padded += len(rest)
    assert padded > 50


def test_a_request_that_ran_under_a_used_id_gets_its_own_parameters():
    sim = Simulation(rows=2, page_size=PAGE_SIZE)
    buckets = Buckets.from_limits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, page_size=PAGE_SIZE)
    batch = InputBatch(buckets, page_size=PAGE_SIZE, num_pages=64)
    for temperature in (0.5, 0.25):
        sim.add(make_request("same", [1, 2, 3], max_tokens=1, temperature=temperature))
        output = sim.launch()
        batch.remove(output.finished_req_ids | output.preempted_req_ids)
        built = batch.build(output)
        assert built.packed["temperature"][built.logits_rows[0]] == np.float32(temperature)
        sim.land()
