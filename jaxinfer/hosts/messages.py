"""Messages between the processes of one engine: which program runs on what. They carry numbers and arrays alone."""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

_LENGTHS = struct.Struct("!IQ")  # bytes of the header, and of the arrays
# A host that is cut off is noticed after about half a minute, not after the two hours of Linux.
_PATIENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Kind(StrEnum):
    """What a message says."""

    HELLO = "hello"  # of a process after the first: its number and digest
    COMPILE = "compile"
    LAUNCH = "launch"
    IDLE = "idle"  # a launch on padding
    REMAKE = "remake"  # parts of the state anew
    SET_LENGTHS = "set_lengths"
    RESTORE_SEATS = "restore_seats"
    END = "end"  # the engine has ended
    FAILED = "failed"  # its sender cannot continue


class Earlier(NamedTuple):
    """A result of an earlier launch, which is on the devices.

    Attributes:
        launch: number of the launch.
        leaf: number of the array among its results.
    """

    launch: int
    leaf: int


@dataclass(frozen=True)
class ProcessMessage:
    """A message.

    Attributes:
        number: of a program and shape, in the list that all processes have; or a length, or a process.
        names: of parts of the state; or a digest.
        inputs: of a launch.
        text: an error.
    """

    kind: Kind
    number: int = 0
    names: tuple[str, ...] = ()
    inputs: Sequence[np.ndarray | Earlier] = ()
    text: str = ""


class Link:
    """One end of a connection between two processes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PATIENCE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._connection = connection

    def send(self, message: ProcessMessage) -> None:
        """Send a message.

        Raises:
            OSError: the connection is closed.
        """
        self._connection.sendall(encoded(message))

    def receive(self) -> ProcessMessage:
        """Wait for the next message.

        Raises:
            OSError: the connection is closed.
        """
        header_length, length = _LENGTHS.unpack(self._read(_LENGTHS.size))
        return _decoded(json.loads(self._read(header_length)), memoryview(self._read(length)))

    def send_secret(self, secret: bytes) -> None:
        """Send a secret, before any message.

        Raises:
            OSError: the connection is closed.
        """
        self._connection.sendall(secret)

    def has_secret(self, secret: bytes) -> bool:
        """Whether the other end sends this secret first. Nothing else of a stranger is read.

        Raises:
            OSError: the connection is closed, or the time is over.
        """
        return hmac.compare_digest(self._read(len(secret)), secret)

    def settimeout(self, seconds: float | None) -> None:
        """Set how long sending and receiving may take; None: for ever."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets an error."""
        with contextlib.suppress(OSError):  # the other end has closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, length: int) -> bytearray:
        found = bytearray(length)
        rest = memoryview(found)
        while rest:
            count = self._connection.recv_into(rest)
            if not count:
                raise ConnectionResetError("the connection is closed")
            rest = rest[count:]
        return found


def encoded(message: ProcessMessage) -> bytes:
    """Return a message as bytes: lengths, a header of JSON, and the arrays one after the other."""
    places: list[Any] = []
    arrays = []
    for given in message.inputs:
        if isinstance(given, Earlier):
            places.append(given)
        else:
            places.append({"dtype": given.dtype.name, "shape": given.shape})
            arrays.append(given.tobytes())
    header = {
        "kind": message.kind, "number": message.number, "names": message.names, "text": message.text, "inputs": places,
    }  # fmt: skip
    head, body = json.dumps(header).encode(), b"".join(arrays)
    return _LENGTHS.pack(len(head), len(body)) + head + body


def _decoded(header: dict[str, Any], body: memoryview) -> ProcessMessage:
    inputs: list[np.ndarray | Earlier] = []
    start = 0
    for place in header["inputs"]:
        if isinstance(place, list):
            inputs.append(Earlier(*place))
            continue
        dtype, shape = np.dtype(place["dtype"]), tuple(place["shape"])
        count = math.prod(shape)
        inputs.append(np.frombuffer(body, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return ProcessMessage(Kind(header["kind"]), header["number"], tuple(header["names"]), tuple(inputs), header["text"])
