"""What the prefix cache holds, published over ZeroMQ in vLLM's format, for routers that follow it.

Frames are a topic, a number of 8 bytes, big-endian, and a batch in msgpack: [time, events, rank], where each event is a
map with its type. The first frame of a replay's answer is empty, and the last answer has the number -1.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxinfer.cache.page_events import PageEvent, PageEvents, PagesRemoved, PagesStored

logger = logging.getLogger("jaxinfer.server")

_WAIT_SECONDS = 0.05
_JOIN_SECONDS = 5.0
_MEDIUM = "GPU"  # the word for an engine's own pool
_END = (-1).to_bytes(8, signed=True)


class KVEventPublisher:
    """A thread that publishes events as they come, and sends again what a subscriber has missed.

    Args:
        events: of the prefix cache.
        endpoint: where subscribers connect, as "tcp://127.0.0.1:5557"; * for all addresses of the machine.
        replay_endpoint: where they ask again for what they have missed; empty: nowhere.
        topic: the first frame of all messages.
        kept: batches that are kept for replays.

    Raises:
        RuntimeError: the extra `kv-events` is missing, or an endpoint cannot be listened on.
    """

    def __init__(
        self, events: PageEvents, endpoint: str, replay_endpoint: str = "", *, topic: str = "", kept: int = 10_000
    ) -> None:
        self._zmq, self._encode = _module("zmq"), _module("msgspec.msgpack").encode
        self._events, self._topic = events, topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._number = 0
        self._context = self._zmq.Context()
        self._publishing = self._listen(self._zmq.PUB, endpoint)
        self._replaying = self._listen(self._zmq.ROUTER, replay_endpoint) if replay_endpoint else None
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what is left, and stop."""
        self._stops.set()
        self._thread.join(_JOIN_SECONDS)

    def _listen(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, 100_000)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RuntimeError(f"events of the KV cache cannot be published at {endpoint}: {error}") from error
        return socket

    def _run(self) -> None:
        try:
            while not self._stops.is_set():
                self._turn(_WAIT_SECONDS)
            self._turn(0.0)
        except Exception:
            logger.exception("events of the KV cache are published no more")
        finally:
            self._events.close()
            self._context.destroy(linger=1000)

    def _turn(self, wait: float) -> None:
        if events := self._events.take(wait):
            payload = self._encode([time.time(), [_as_map(event, self._events.page_size) for event in events], 0])
            self._publishing.send_multipart([self._topic, self._number.to_bytes(8), payload])
            self._kept.append((self._number, payload))
            self._number += 1
        while self._replaying is not None and self._replaying.poll(0):
            self._replay(self._replaying, self._replaying.recv_multipart())

    def _replay(self, socket: Any, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning(
                "a request for a replay has %d frames; wanted are an empty one and a number", len(frames) - 1
            )
            return
        client, first = frames[0], int.from_bytes(frames[2])
        for number, payload in self._kept:
            if number >= first:
                socket.send_multipart([client, b"", number.to_bytes(8), payload])
        socket.send_multipart([client, b"", _END, b""])


def _as_map(event: PageEvent, page_size: int) -> dict[str, Any]:
    if isinstance(event, PagesStored):
        return {
            "type": "BlockStored", "block_hashes": event.hashes, "parent_block_hash": event.parent,
            "token_ids": event.token_ids, "block_size": page_size, "lora_id": None, "medium": _MEDIUM,
            "lora_name": None,
        }  # fmt: skip
    if isinstance(event, PagesRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": _MEDIUM}
    return {"type": "AllBlocksCleared"}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"events of the KV cache need the extra `kv-events` (pip install 'jaxinfer[kv-events]'): {error}"
        ) from error
