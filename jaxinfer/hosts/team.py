"""The processes that share a model: how they find one another, and what they agree on before an engine starts."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxinfer.engine.errors import LostProcessError
from jaxinfer.hosts.messages import Kind, Link, ProcessMessage
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.warm_up import by_likelihood

logger = logging.getLogger(__name__)

_SECONDS_TO_CONNECT, _SECONDS_TO_LEAVE = 300.0, 60.0
_SECONDS_TO_SAY_IT, _SECONDS_OF_A_STEP = 5.0, 60.0
EXIT_LOST = 3
_BYTES_OF_SECRET = 32


@dataclass(frozen=True)
class Team:
    """Processes that have joined.

    Attributes:
        address: host:port of the first process, as the others reach it.
        process_id: number of this process; 0 decides.
    """

    address: str
    num_processes: int
    process_id: int

    @property
    def leads(self) -> bool:
        return self.process_id == 0

    def check(self, mesh: Mesh | None) -> None:
        """Raise ValueError unless a mesh has all devices of all processes."""
        size, count = 1 if mesh is None else mesh.size, len(jax.devices())
        if size != count:
            raise ValueError(
                f"tensor_parallel_size={size}, but {self.num_processes} processes with {count} devices share the "
                f"model: it must be {count}"
            )

    def least(self, number: int) -> int:
        """Return the least of the processes' numbers. All of them call this."""
        return int(multihost_utils.process_allgather(np.asarray(number, np.int64)).min())

    def welcome(self, digest: str) -> Followers:
        """Wait for the connections of all other processes; in the first one.

        Raises:
            RuntimeError: a process has another engine.
            TimeoutError: a process has not come.
        """
        with _listening(self.num_processes) as server:
            secret = secrets.token_bytes(_BYTES_OF_SECRET)
            _told(np.frombuffer(server.getsockname()[1].to_bytes(4) + secret, np.uint8))
            deadline = time.monotonic() + _SECONDS_TO_CONNECT
            links: dict[int, Link] = {}
            while len(links) < self.num_processes - 1:
                server.settimeout(max(0.001, deadline - time.monotonic()))
                link = Link(server.accept()[0])
                link.settimeout(_SECONDS_TO_SAY_IT)
                try:
                    is_known = link.has_secret(secret)
                except OSError:
                    is_known = False
                if not is_known:
                    logger.warning("a connection that is no process of this engine")
                    link.close()
                    continue
                hello = link.receive()
                link.settimeout(None)
                links[hello.number] = link
                if hello.names != (digest,):
                    reason = (
                        f"process {hello.number} has another engine than process 0: all need the same checkpoint, "
                        "arguments and versions"
                    )
                    _fail(links.values(), reason)
                    raise RuntimeError(reason)
        return Followers(links)

    def come(self, digest: str) -> Link:
        """Connect to the first process; in the others."""
        found = _told(np.zeros(4 + _BYTES_OF_SECRET, np.uint8)).tobytes()
        host, port = self.address.rpartition(":")[0].strip("[]"), int.from_bytes(found[:4])
        link = Link(socket.create_connection((host, port), timeout=_SECONDS_TO_CONNECT))
        link.settimeout(None)
        link.send_secret(found[4:])
        link.send(ProcessMessage(Kind.HELLO, self.process_id, (digest,)))
        _links.append(link)
        return link


class Followers:
    """Connections of the first process to all others.

    Attributes:
        on_loss: called once, by any thread, when a process is lost.
        is_stuck: whether a step still runs some time after that. A device may wait for the lost process for ever, and
            nothing can end its launches: this process is ended then, as JAX would have done at once.
    """

    def __init__(self, links: dict[int, Link]) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._has_ended = False
        self.on_loss: Callable[[], object] = lambda: None
        self.is_stuck: Callable[[], bool] = lambda: False
        for number, link in links.items():
            thread = threading.Thread(target=self._watch, args=(number, link), name=f"process {number}", daemon=True)
            thread.start()
            _watching.append(thread)
        atexit.register(self.end)

    def check(self) -> None:
        """Raise LostProcessError if a process is lost."""
        if self._lost is not None:
            raise LostProcessError(self._lost)

    def send(self, message: ProcessMessage) -> None:
        """Send a message to all.

        Raises:
            LostProcessError: a process is lost.
        """
        with self._lock:
            self.check()
            for number, link in self._links.items():
                try:
                    link.send(message)
                except OSError as error:
                    self.lose(f"process {number} is lost: {error}")
        self.check()

    def lose(self, reason: str) -> None:
        """Note that the processes do not share an engine any more."""
        if self._lost is None and not self._has_ended:
            logger.critical("%s", reason)
            self._lost = reason
            _fail(self._links.values(), reason)
            threading.Thread(target=self._end_if_stuck, name="end if stuck", daemon=True).start()
            self.on_loss()

    def _end_if_stuck(self) -> None:
        time.sleep(_SECONDS_OF_A_STEP)
        if self.is_stuck():
            logger.critical("a step has waited %g seconds for a lost process: ending", _SECONDS_OF_A_STEP)
            os._exit(EXIT_LOST)

    def end(self) -> None:
        """Let the other processes end."""
        if not self._has_ended and self._lost is None:
            self.send(ProcessMessage(Kind.END))
        self._has_ended = True
        atexit.unregister(self.end)

    def _watch(self, number: int, link: Link) -> None:
        try:
            message = link.receive()
        except OSError as error:
            self.lose(f"process {number} is lost: {error}")
        else:
            self.lose(f"process {number} has failed: {message.text}")


def _fail(links: Iterable[Link], reason: str) -> None:
    """Tell other processes that the engine has failed, and close the connections."""
    for link in links:
        with contextlib.suppress(OSError):  # it is the lost one, or takes nothing
            link.settimeout(_SECONDS_TO_SAY_IT)
            link.send(ProcessMessage(Kind.FAILED, text=reason))
        link.close()


def _listening(count: int) -> socket.socket:
    """Return a socket that listens on all addresses, as JAX's coordinator does."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=count, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=count)


def digest_of_engine(runner: Runner, settings: Sequence[object]) -> str:
    """Return a digest of what all processes must have alike."""
    lines = [version("jaxinfer"), jax.__version__, *map(repr, settings)]
    lines += [program.describe(shape) for program, shape in by_likelihood(runner.programs)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _told(values: np.ndarray) -> np.ndarray:
    """Return what the first process says. All of them call this."""
    return np.asarray(multihost_utils.broadcast_one_to_all(values.astype(np.int32))).astype(np.uint8)


_team: Team | None = None
# Processes after the first one: connections, which are open until the process has left JAX's runtime.
_links: list[Link] = []
_watching: list[threading.Thread] = []  # in the first one: a thread for each connection, until it is closed


def _wait_for_others() -> None:
    """Wait until the other processes have left: JAX aborts those that outlive the first one."""
    for thread in _watching:
        thread.join(_SECONDS_TO_LEAVE)


def join(coordinator_address: str, num_processes: int, process_id: int) -> Team:
    """Let this process share models with others. Call it before anything else that uses JAX.

    Every process builds the same `LLM`, with a `tensor_parallel_size` of all their devices. The first one uses it, and
    the others call `follow`.

    Args:
        coordinator_address: host:port of the first process, as the others reach it.
        num_processes: number of processes.
        process_id: number of this one, from 0.

    Raises:
        ValueError: there is no such process.
        RuntimeError: this process has joined already, or has used JAX before.
    """
    global _team
    if _team is not None:
        raise RuntimeError("this process has joined already")
    if num_processes < 2 or not 0 <= process_id < num_processes:
        raise ValueError(f"there is no process {process_id} of {num_processes}; there are at least 2, from 0")
    host, _, port = coordinator_address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator_address must be host:port, got {coordinator_address!r}")
    # JAX would end this process, without a word to its requests, as soon as another one is lost.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(coordinator_address, num_processes, process_id)
    if process_id == 0:
        atexit.register(_wait_for_others)  # it runs after the ends of engines, which are registered later
    _team = Team(coordinator_address, num_processes, process_id)
    return _team


def has_joined() -> bool:
    """Whether this process shares models with others. It starts no device."""
    return _team is not None


def current_team() -> Team | None:
    """Return the processes that this one has joined; None: it is alone."""
    if _team is None and jax.process_count() > 1:
        logger.warning(
            "%d processes share JAX without jaxinfer.hosts.team.join: each runs this engine by itself, with all "
            "requests, and may launch something else than the others, which then wait for ever",
            jax.process_count(),
        )
    return _team
