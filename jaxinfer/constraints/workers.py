"""Threads for the work of constraints: compiles of grammars, and walks along tokens that were drawn."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxinfer.constraints.automaton import ConstraintError

logger = logging.getLogger(__name__)

# Work of a grammar gives way to that of the engine's own threads.
_NICENESS = 5
# How often an idle thread looks for others that are stuck.
_LOOK_SECONDS = 1.0
# Where all threads have been at their pieces for so long, one more is started: one slow grammar holds no others up.
_SLOW_SECONDS = 0.5


@dataclass(eq=False)
class _Worker:
    """A thread, and what it works on."""

    future: Future[Any] | None = None
    since: float = 0.0
    is_given_up: bool = False


class Workers:
    """A few threads that run pieces of work in the order in which they were submitted.

    A call inside a library cannot be stopped. A thread that takes too long for one piece is given up: the piece fails,
    and another thread takes its place, a limited number of times. While all threads are slow there are more of them.

    Args:
        count: number of threads, which start with the first piece.
        patience: most seconds for one piece.
        most_replaced: threads that may be given up; after that, `submit` raises. And how many more there may be.
    """

    def __init__(self, count: int = 2, *, patience: float = 20.0, most_replaced: int = 4) -> None:
        self._count, self._patience, self._most_replaced = count, patience, most_replaced
        self._pieces: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._num_replaced = 0
        weakref.finalize(self, _stop, self._pieces, count)

    def submit[T](self, work: Callable[[], T]) -> Future[T]:
        """Queue a piece of work.

        Raises:
            ConstraintError: too many threads were given up.
        """
        return self.submit_all([work])[0]

    def submit_all[T](self, works: Sequence[Callable[[], T]]) -> list[Future[T]]:
        """Queue pieces of work, in this order.

        Raises:
            ConstraintError: too many threads were given up.
        """
        self.give_up_stuck()
        with self._lock:
            if self._num_replaced > self._most_replaced:
                raise self._no_more()
            while len(self._workers) < self._count:
                self._start()
            self._relieve(time.monotonic())
        futures: list[Future[T]] = []
        for work in works:
            future: Future[T] = Future()
            self._pieces.put((future, work))
            futures.append(future)
        return futures

    def run[T](self, work: Callable[[], T]) -> T:
        """Run a piece of work in one of the threads, and wait for its result.

        Raises:
            ConstraintError: it took too long, or too many threads were given up.
        """
        future = self.submit(work)
        while True:
            try:
                return future.result(timeout=_LOOK_SECONDS)
            except TimeoutError:
                if future.done():
                    return future.result()  # it has ended just now, or has itself raised this
                self.give_up_stuck()

    def give_up_stuck(self) -> None:
        """Let pieces fail that have taken too long, and start threads in the place of theirs."""
        now = time.monotonic()
        with self._lock:
            for worker in list(self._workers):
                if worker.future is None or now - worker.since <= self._patience:
                    continue
                worker.is_given_up = True
                self._workers.remove(worker)
                self._num_replaced += 1
                error = ConstraintError(f"a constraint took more than {self._patience:g} seconds and was given up")
                worker.future.set_exception(error)
                if self._num_replaced <= self._most_replaced:
                    self._start()
            if self._num_replaced > self._most_replaced and not self._workers:
                self._fail_queued()
            elif not self._pieces.empty():
                self._relieve(now)

    def _relieve(self, now: float) -> None:
        """Start one more thread if all of them are slow. The lock is held."""
        are_slow = all(worker.future is not None and now - worker.since > _SLOW_SECONDS for worker in self._workers)
        if are_slow and len(self._workers) < self._count + self._most_replaced:
            self._start()

    def leave(self, worker: _Worker) -> bool:
        """Let an idle thread end if there are more of them than wanted; return whether it does."""
        with self._lock:
            leaves = len(self._workers) > self._count
            if leaves:
                self._workers.remove(worker)
            return leaves

    def note_ended(self) -> None:
        """Note that a thread that was given up has ended after all: another one may be."""
        with self._lock:
            self._num_replaced -= 1

    def _fail_queued(self) -> None:
        """Let pieces fail that no thread will take."""
        while True:
            try:
                piece = self._pieces.get_nowait()
            except queue.Empty:
                return
            if piece is not None:
                piece[0].set_exception(self._no_more())

    def _no_more(self) -> ConstraintError:
        return ConstraintError(
            f"no grammar is followed any more: {self._num_replaced} pieces of work took more than "
            f"{self._patience:g} seconds each"
        )

    def _start(self) -> None:
        worker = _Worker()
        self._workers.append(worker)
        arguments = worker, self._pieces, self._lock, weakref.ref(self)
        threading.Thread(target=_run, args=arguments, daemon=True, name="constraints").start()


def _run(
    worker: _Worker, pieces: queue.SimpleQueue[Any], lock: threading.Lock, of: Callable[[], Workers | None]
) -> None:
    """Run pieces of work; `of` returns the workers, unless they have been dropped."""
    # Only Linux has priorities of single threads.
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
    while not worker.is_given_up:
        piece = None
        try:
            try:
                piece = pieces.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                workers = of()
                if workers is None or workers.leave(worker):
                    return
                workers.give_up_stuck()
                continue
            if piece is None:
                return
            _work_on(worker, lock, *piece)
        except BaseException as error:
            # Raised beside the work itself. The piece fails, and the thread takes the next one.
            _fail(worker, lock, piece, error)
    workers = of()
    if workers is not None:
        workers.note_ended()


def _work_on(worker: _Worker, lock: threading.Lock, future: Future[Any], work: Callable[[], Any]) -> None:
    with lock:
        worker.future, worker.since = future, time.monotonic()
    result, error = None, None
    try:
        result = work()
    except BaseException as raised:
        error = raised
    with lock:
        worker.future = None
        if worker.is_given_up:
            return
        # Under the lock, so that the piece is not given up meanwhile.
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _fail(worker: _Worker, lock: threading.Lock, piece: tuple[Future[Any], Any] | None, error: BaseException) -> None:
    with lock:
        worker.future = None
        if piece is not None and not piece[0].done():
            piece[0].set_exception(error)
            return
    logger.error("a thread of constraints failed between pieces of work, and continues", exc_info=error)


def _stop(pieces: queue.SimpleQueue[Any], count: int) -> None:
    for _ in range(count):
        pieces.put(None)
