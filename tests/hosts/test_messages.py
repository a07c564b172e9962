"""Messages between processes: what is sent arrives, and what is no message is refused."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from jaxinfer.hosts.messages import Earlier, Kind, Link, ProcessMessage


@pytest.fixture
def links():
    first, second = socket.socketpair()
    return Link(FakeTcp(first)), Link(FakeTcp(second))


class FakeTcp:
    """A socket that is none of TCP, for options of TCP."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def setsockopt(self, *_: int) -> None:
        pass

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


def test_a_message_arrives_as_it_was_sent(links):
    inputs = [
        np.arange(6, dtype=np.int32).reshape(2, 3), Earlier(7, 2), np.zeros((0, 4), np.uint32),
        np.array(3, np.int32), np.array([True, False]), np.array([1.5], np.float32),
    ]  # fmt: skip
    links[0].send(ProcessMessage(Kind.LAUNCH, 5, ("kv", "seats"), inputs, "text"))
    found = links[1].receive()
    assert (found.kind, found.number, found.names, found.text) == (Kind.LAUNCH, 5, ("kv", "seats"), "text")
    for got, sent in zip(found.inputs, inputs, strict=True):
        if isinstance(sent, Earlier):
            assert got == sent
        else:
            assert isinstance(got, np.ndarray) and got.dtype == sent.dtype and got.shape == sent.shape
            assert (got == sent).all()


def test_a_large_message_arrives_in_pieces(links):
    values = np.random.default_rng(0).integers(0, 1 << 30, 500_000).astype(np.int32)
    sending = threading.Thread(target=links[0].send, args=(ProcessMessage(Kind.LAUNCH, inputs=[values]),))
    sending.start()
    found = links[1].receive()
    sending.join()
    assert isinstance(found.inputs[0], np.ndarray) and (found.inputs[0] == values).all()


def test_the_end_of_a_connection_is_an_error_for_its_reader(links):
    links[0].close()
    with pytest.raises(OSError):
        links[1].receive()


@pytest.mark.parametrize("sent", [bytes(32), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(32)])
def test_a_stranger_has_no_secret_and_nothing_else_of_it_is_read(links, sent):
    links[0].send_secret(sent)
    assert not links[1].has_secret(b"s" * 32)


def test_who_says_nothing_is_given_up(links):
    links[1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        links[1].has_secret(b"s" * 32)


def test_the_secret_comes_before_the_messages(links):
    links[0].send_secret(b"s" * 32)
    links[0].send(ProcessMessage(Kind.HELLO, 1, ("digest",)))
    assert links[1].has_secret(b"s" * 32)
    assert links[1].receive() == ProcessMessage(Kind.HELLO, 1, ("digest",), ())
