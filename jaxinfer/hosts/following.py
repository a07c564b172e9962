"""The runner of every process after the first: it launches what the first one says, and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax

from jaxinfer.engine.errors import LostProcessError, ProcessError
from jaxinfer.hosts.leading import LAUNCHES_KEPT
from jaxinfer.hosts.messages import Earlier, Kind, Link, ProcessMessage
from jaxinfer.programs.program import Program
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.warm_up import MOST_THREADS, by_likelihood


class FollowingCore(Protocol):
    """What following uses of the engine; see `EngineCore`."""

    runner: Runner

    @property
    def make_state(self) -> Callable[[], Mapping[str, Any]]: ...


class FollowingRunner(Runner):
    """Runner that repeats the launches of the first process."""

    is_shared = True

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._keys = list(by_likelihood(self.programs))
        self._link: Link | None = None
        self._kept: deque[list[Any]] = deque(maxlen=LAUNCHES_KEPT)
        self._num_launches = 0

    def listen_to(self, link: Link) -> None:
        """Set the connection to the first process."""
        self._link = link

    def launch(self, program: Program, shape: Any, *inputs: Any) -> Any:
        raise ProcessError("process 0 alone uses the engine: this process calls follow")

    def launch_idle(self, program: Program, shape: Any) -> Any:
        return self.launch(program, shape)

    def follow(self, make_state: Callable[[], Mapping[str, Any]]) -> None:
        """Do what the first process says, until it ends.

        Raises:
            LostProcessError: it is lost.
        """
        link = self._link
        assert link is not None, "the first process has not been reached"
        compiles: deque[Future[Any]] = deque()
        compiling = ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS), thread_name_prefix="compiles")
        try:
            while (message := _next_of(link)).kind is not Kind.END:
                while compiles and compiles[0].done():
                    compiles.popleft().result()
                self._obey(message, make_state, compiling, compiles)
        except LostProcessError:
            raise
        except Exception as error:
            with contextlib.suppress(OSError):  # it is gone as well
                link.send(ProcessMessage(Kind.FAILED, text=f"{type(error).__name__}: {error}"))
            raise
        finally:
            compiling.shutdown(wait=False, cancel_futures=True)

    def _obey(
        self,
        message: ProcessMessage,
        make_state: Callable[[], Mapping[str, Any]],
        compiling: ThreadPoolExecutor,
        compiles: deque[Future[Any]],
    ) -> None:
        match message.kind:
            case Kind.COMPILE:
                compiles.append(compiling.submit(self.compile, *self._keys[message.number]))
            case Kind.LAUNCH:
                program, shape = self._keys[message.number]
                inputs = [
                    self._kept[x.launch - self._num_launches][x.leaf] if isinstance(x, Earlier) else x
                    for x in message.inputs
                ]
                results = super().launch(program, shape, *inputs)
                self._kept.append(jax.tree.leaves(results))
                self._num_launches += 1
            case Kind.IDLE:
                super().launch_idle(*self._keys[message.number])
            case Kind.REMAKE:
                self._remake(message.names, make_state)
            case Kind.SET_LENGTHS:
                self.set_lengths(message.number)
            case Kind.RESTORE_SEATS:
                self.restore_seats()
            case Kind.FAILED:
                raise LostProcessError(message.text)
            case _:
                raise RuntimeError(f"process 0 sent {message.kind!r}")


def follow(core: FollowingCore) -> None:
    """Take part in the engine of the first process until that one ends.

    Args:
        core: `llm.core`, of an `LLM` with the same arguments as that of the first process.

    Raises:
        RuntimeError: this process is the first one, or has not joined others.
        LostProcessError: the first process is lost.
    """
    runner = core.runner
    if not isinstance(runner, FollowingRunner):
        raise RuntimeError("only processes after the first follow; see jaxinfer.hosts.team.join")
    runner.follow(core.make_state)


def _next_of(link: Link) -> ProcessMessage:
    try:
        return link.receive()
    except OSError as error:
        raise LostProcessError(f"process 0 is lost: {error}") from error
