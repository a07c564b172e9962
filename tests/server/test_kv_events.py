"""Events of the prefix cache, as a subscriber of a server gets them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import zmq

from jaxinfer.cache.page_events import PageEvents
from jaxinfer.server.kv_events import KVEventPublisher
from tests.server.processes import free_port, serving

SIZE = 16
_SECONDS = 60_000  # milliseconds


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def replayed(context: zmq.Context, endpoint: str, first: int = 0) -> list[tuple[int, Any]]:
    """Ask for batches from a number on, as vLLM's subscribers do."""
    with context.socket(zmq.DEALER) as asking:
        asking.connect(endpoint)
        asking.send_multipart([b"", first.to_bytes(8)])
        found = []
        while True:
            assert asking.poll(_SECONDS)
            empty, number, payload = asking.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, signed=True) == -1:
                assert payload == b""
                return found
            found.append((int.from_bytes(number), msgspec.msgpack.decode(payload)))


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


def test_a_subscriber_follows_what_a_server_caches(context):
    publishing, replaying = free_endpoint(), free_endpoint()
    options = ("--kv-events-endpoint", publishing, "--kv-events-replay-endpoint", replaying, "--kv-events-topic", "kv")
    with serving(*options) as server, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(publishing)
        subscriber.subscribe(b"kv")
        prompt = list(range(100, 150))
        asked = {"prompt": prompt, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        answer = server.json("POST", "/v1/completions", asked)
        tokens = prompt + answer["choices"][0]["token_ids"]
        wanted, stored = tokens[: (len(tokens) - 1) // SIZE * SIZE], []
        before = None
        while len(stored) < len(wanted):
            assert subscriber.poll(_SECONDS)
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b"kv" and len(number) == 8
            seconds, events, rank = msgspec.msgpack.decode(payload)
            assert abs(time.time() - seconds) < 600 and rank == 0
            for event in events:
                if event["type"] == "AllBlocksCleared":
                    continue
                assert event["type"] == "BlockStored" and event["block_size"] == SIZE and event["medium"] == "GPU"
                assert event["parent_block_hash"] == before
                assert len(event["token_ids"]) == SIZE * len(event["block_hashes"])
                before = event["block_hashes"][-1]
                stored += event["token_ids"]
        assert stored == wanted
        salted = server.json("POST", "/v1/completions", {**asked, "prompt": prompt[::-1], "cache_salt": "mine"})
        assert salted["choices"]
        assert server.request("POST", "/reset_prefix_cache")[0] == 200
        kinds = []
        for start in (0, 1):
            batches = replayed(context, replaying, start)
            assert [number for number, _ in batches] == list(range(start, start + len(batches)))
            kinds.append([event["type"] for _, batch in batches for event in batch[1]])
        assert kinds[0][0] == "AllBlocksCleared" and kinds[0][-1] == "BlockRemoved"
        hashes = [each for _, batch in replayed(context, replaying) for event in batch[1]
                  for each in event.get("block_hashes", ())]  # fmt: skip
        assert len(hashes) == 2 * len(wanted) // SIZE  # each was stored and removed; what has a salt is not told of


def test_batches_that_are_not_kept_any_more_are_not_replayed(context):
    events, endpoint = PageEvents(SIZE), free_endpoint()
    publisher = KVEventPublisher(events, free_endpoint(), endpoint, kept=2)
    try:
        for number in range(1, 5):
            events.cleared()
            deadline = time.monotonic() + 60
            while replayed(context, endpoint, number - 1) == [] and time.monotonic() < deadline:
                time.sleep(0.01)
        assert [number for number, _ in replayed(context, endpoint)] == [2, 3]
        assert replayed(context, endpoint, 9) == []
        assert replayed(context, endpoint, 3)[0][1][1] == [{"type": "AllBlocksCleared"}]
    finally:
        publisher.close()
    events.cleared()
    assert events.take() == []  # nothing publishes them any more


def test_an_endpoint_that_is_taken_is_named():
    endpoint = free_endpoint()
    publisher = KVEventPublisher(PageEvents(SIZE), endpoint)
    try:
        with pytest.raises(RuntimeError, match=f"published at {endpoint}: Address already in use"):
            KVEventPublisher(PageEvents(SIZE), endpoint)
    finally:
        publisher.close()
