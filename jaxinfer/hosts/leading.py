"""The runner of the first process: what it launches, all others launch too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.errors import LostProcessError
from jaxinfer.hosts.messages import Earlier, Kind, ProcessMessage
from jaxinfer.hosts.team import Followers
from jaxinfer.programs.program import Program
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.warm_up import by_likelihood

# Launches whose results may be inputs of later ones.
LAUNCHES_KEPT = 2


class LeadingRunner(Runner):
    """Runner that decides for other processes: each gets every launch with its inputs, in the same order.

    A thread of its own sends a message and does the same here: no signal can come between the two, so an interrupted
    step leaves all processes alike.
    """

    is_shared = True

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._numbers = {key: number for number, key in enumerate(by_likelihood(self.programs))}
        self._followers: Followers | None = None
        self._num_launches = 0
        self._kept: deque[tuple[int, list[Any]]] = deque(maxlen=LAUNCHES_KEPT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launches of all processes")
        self._thread.submit(lambda: None).result()  # a signal while it starts could leave two

    def lead(self, followers: Followers) -> None:
        """Begin to decide for other processes."""
        self._followers = followers

    def launch(self, program: Program, shape: Any, *inputs: Any) -> Any:
        self.ready(program, shape)  # in this thread, whose compiles are counted
        message = ProcessMessage(Kind.LAUNCH, self._number_of(program, shape), inputs=[*map(self._named, inputs)])
        launch = super().launch

        def run() -> Any:
            results = launch(program, shape, *inputs)
            self._kept.append((self._num_launches, jax.tree.leaves(results)))
            self._num_launches += 1
            return results

        return self._everywhere(message, run)

    def launch_idle(self, program: Program, shape: Any) -> Any:
        self.ready(program, shape)
        message = ProcessMessage(Kind.IDLE, self._number_of(program, shape))
        return self._everywhere(message, partial(super().launch_idle, program, shape))

    def compile(self, program: Program, shape: Any) -> jax.stages.Compiled:
        if self._followers is not None and (program, shape) not in self._executables:
            message = ProcessMessage(Kind.COMPILE, self._number_of(program, shape))
            self._thread.submit(self._followers.send, message).result()
        return super().compile(program, shape)

    def salvage(self, make_state: Callable[[], Mapping[str, Any]]) -> None:
        self._thread.submit(lambda: None).result()  # an interrupted launch is over
        if self._followers is not None:
            self._followers.check()
        super().salvage(make_state)

    def _remake(self, lost: Sequence[str], make_state: Callable[[], Mapping[str, Any]]) -> None:
        self._everywhere(ProcessMessage(Kind.REMAKE, names=tuple(lost)), partial(super()._remake, lost, make_state))

    def set_lengths(self, length: int) -> None:
        self._everywhere(ProcessMessage(Kind.SET_LENGTHS, length), partial(super().set_lengths, length))

    def restore_seats(self) -> None:
        self._everywhere(ProcessMessage(Kind.RESTORE_SEATS), super().restore_seats)

    def _everywhere(self, message: ProcessMessage, run: Callable[[], Any]) -> Any:
        """Send a message to the other processes, and do here what it says.

        Raises:
            LostProcessError: a process is lost, or this one could not do what the others do.
        """
        followers = self._followers
        assert followers is not None, "the other processes have not come"

        def work() -> Any:
            followers.send(message)
            try:
                return run()
            except Exception as error:
                followers.lose(f"process 0 could not run what the others run: {error}")
                raise LostProcessError(str(error)) from error

        return self._thread.submit(work).result()

    def _number_of(self, program: Program, shape: Any) -> int:
        number = self._numbers.get((program, shape))
        if number is None:
            raise RuntimeError(f"the other processes have no program {program.describe(shape)}")
        return number

    def _named(self, given: Any) -> np.ndarray | Earlier:
        """Return a host array as it is, and a device array by the launch that it is a result of."""
        if not isinstance(given, jax.Array):
            return np.asarray(given)
        for launch, results in reversed(self._kept):
            for leaf, result in enumerate(results):
                if result is given:
                    return Earlier(launch, leaf)
        raise RuntimeError("an input is on the devices, and is no result of the latest launches")
