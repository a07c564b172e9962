"""Run an engine's requests with a fault in one of its lines, and compare the answers with an undisturbed run."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxinfer.engine.core import EngineCore
from jaxinfer.frontend.output_processor import OutputProcessor
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.strategies.beams import BeamRun
from tests.faults.lines import Fault, InjectedError, Line, Recording
from tests.faults.ways import Item, Way, tokenizer

# A run that takes so many times the steps of an undisturbed one, and these besides, hangs.
_MOST_STEPS, _MORE_STEPS = 20, 100


class HangError(AssertionError):
    """Requests are unfinished after far too many steps."""


@dataclass
class Answer:
    """What a reader has of one sequence."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    num_logprobs: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_ends: int = 0

    def add(self, part: Any) -> None:
        assert self.finish_reason is None, "something came after the end"
        self.tokens += part.token_ids
        self.text += part.text
        self.num_logprobs += len(part.logprobs or ())
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason
        self.num_ends += part.finished


type Answers = dict[str, Any]


class Trial:
    """An engine of one way of decoding, whose programs are compiled by the first run.

    Args:
        beside: whether others are asked for beside the first.
    """

    def __init__(self, way: Way, *, beside: bool, core: EngineCore | None = None) -> None:
        self.way, self.beside = way, beside
        self._open(core or way.make())
        self.expected = self.run()  # compiles
        self.num_steps, self.expected = 10**6, self.run()

    def _open(self, core: EngineCore) -> None:
        self.core, self.num_steps = core, 10**6
        self.processor = OutputProcessor(core, tokenizer())
        core.landing_listeners.append(self.processor.process)

    def close(self) -> EngineCore:
        """The engine, for another trial."""
        self.core.landing_listeners.remove(self.processor.process)
        return self.core

    def with_new_engine(self) -> Trial:
        """A trial with the same answers, whose engine has traced no program yet."""
        jax.clear_caches()
        other = copy.copy(self)
        other._open(self.way.make())
        return other

    def record_traced(self) -> Counter[Line]:
        """The lines that run while the programs of a new engine are traced, and at no other time."""
        recording = Recording()
        self.with_new_engine().run(recording)
        known = self.record().counts
        return Counter({line: count for line, count in recording.counts.items() if line not in known})

    def record(self) -> Recording:
        """The lines of an undisturbed run, of the calls that may be interrupted."""
        recording = Recording()
        self.run(recording)
        return recording

    def record_recovery(self) -> Recording:
        """The lines of a recovery."""
        transactions = self.core.transactions
        recording, remake = Recording(), transactions._remake

        def recorded() -> None:
            with recording:
                remake()

        transactions._remake = recorded
        self.run(interrupt=lambda step: step == 3)
        transactions._remake = remake
        return recording

    def run(
        self,
        fault: Fault | Recording | None = None,
        *,
        interrupt: Callable[[int], bool] = lambda step: False,
        items: Mapping[int, list[Item]] | None = None,
        keeps_cache: bool = False,
    ) -> Answers:
        """What readers get, with the calls that may be interrupted inside of `fault`, or recorded.

        Args:
            interrupt: before which steps the engine is to find that the step before was interrupted.
            items: what arrives before each step; None: what the way says.
            keeps_cache: keep the prefixes that earlier runs have cached.
        """
        core, inbox = self.core, self.processor.inbox()
        if not keeps_cache:
            core.reset_prefix_cache()
        core._progress_log._time = -math.inf  # its line is due in every run, whatever the clock says
        items = self.way.items(self.beside) if items is None else items
        answers: dict[str, Answer] = {}
        searches: dict[str, BeamRun] = {}
        step = 0

        def guarded(call: Callable[[], Any]) -> Any:
            with fault if fault is not None and fault.is_armed else contextlib.nullcontext():
                for _ in range(4):
                    with contextlib.suppress(InjectedError, KeyboardInterrupt):
                        return call()
            raise AssertionError("interrupted more often than faults were injected")

        while step <= max(items) or core.has_unfinished_requests():
            if step > _MOST_STEPS * min(self.num_steps, 1000) + _MORE_STEPS:
                raise HangError(f"unfinished after {step} steps: {core._host.in_words()}")
            for item in items.get(step, ()):
                self._add(item, inbox, searches)
            if interrupt(step):
                core.transactions._open.append(True)
            guarded(core.step)
            for output in guarded(inbox.take):
                _sort(output, answers)
            step += 1
        self.num_steps = min(self.num_steps, step)
        core.check_integrity()
        assert core.scheduler.kv.allocator.num_held == 0, "pages are held by no request"
        assert len(core.input_batch.free_seats) + len(core.scheduler.finished_req_ids) == core.config.max_num_seqs
        assert not self.processor._followers and not core._requests and not core.searches
        found: Answers = {name: vars(answer) for name, answer in answers.items()}
        for name, search in searches.items():
            assert search.error is None, search.error
            found[name] = [(one.tokens, round(one.score, 3)) for one in search.search.hypotheses]
        return found

    def _add(self, item: Item, inbox: Any, searches: dict[str, BeamRun]) -> None:
        if isinstance(item, RequestGroup):
            self.processor.follow_group(item, inbox, stream=item.members[0].stream)
            self.core.add_group(item)
        elif callable(item):
            search = item(self.core)
            searches[search._request_id] = search
        else:
            self.processor.follow(item, inbox, stream=item.stream)
            self.core.add_request(item)

    def outcome(self, fault: Fault) -> str:
        """In a word what became of a run with a fault and of the same again: "right", or what was wrong."""
        try:
            if (found := self.run(fault)) != self.expected:
                return f"wrong: {_difference(found, self.expected)}"
            if (found := self.run()) != self.expected:
                return f"wrong afterwards: {_difference(found, self.expected)}"
        except HangError:
            return "hang"
        except Exception as error:
            return f"dead: {type(error).__name__}: {error}"
        return "right" if fault.num_raised else "right (line not reached)"


def _sort(output: RequestOutput, answers: dict[str, Answer]) -> None:
    for part in output.outputs:
        answers.setdefault(f"{output.request_id}/{part.index}", Answer()).add(part)


def faults_of(line: Line, count: int, rng: random.Random) -> list[Fault]:
    """At the first and one more occurrence of a line: a RuntimeError and a KeyboardInterrupt, in either order."""
    errors: list[Callable[[], BaseException]] = [lambda: InjectedError("injected"), KeyboardInterrupt]
    rng.shuffle(errors)
    occurrences = [1] if count == 1 else [1, rng.randint(2, count)]
    return [Fault(line, occurrence, error) for occurrence, error in zip(occurrences, errors, strict=False)]


def double_fault(first: tuple[Line, int], second: tuple[Line, int], rng: random.Random) -> Fault:
    """A fault at some occurrence of a line and one at another line in the recovery from it, each of either kind."""
    (line, count), (then, times) = first, second
    errors = [rng.choice([lambda: InjectedError("injected"), KeyboardInterrupt]) for _ in range(2)]
    return Fault(line, rng.randint(1, count), errors[0], (then, rng.randint(1, times), errors[1]))


def _difference(found: Answers, expected: Answers) -> str:
    """The first answer that differs."""
    name = next(name for name in {**expected, **found} if found.get(name) != expected.get(name))
    return f"{name} {found.get(name)} instead of {expected.get(name)}"
