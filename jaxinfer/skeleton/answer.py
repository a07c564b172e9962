"""Skeleton-of-Thought: a plan, then all of its points at once, then one answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxinfer.constraints.automaton import TokenAutomaton
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.skeleton.grammar import SkeletonGrammar
from jaxinfer.skeleton.plan import END, Skeleton, SkeletonPoint, point_text
from jaxinfer.skeleton.prompts import PROTOCOLS, Messages, OutlinePrompts, PlanPrompts, SkeletonPrompts
from jaxinfer.tokenizer import Tokenizer

MOST_SKELETON_TOKENS = 200
_MOST_POINT_TOKENS = 256


class Engine(Protocol):
    """What is asked of an `LLM`."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def vocabulary(self) -> Vocabulary: ...

    def get_tokenizer(self) -> Tokenizer: ...
    def get_metrics(self) -> EngineMetrics: ...
    def default_sampling_params(self, **given: Any) -> SamplingParams: ...
    def outputs_of_chat(
        self, messages: Messages, params: SamplingParams, constraint: TokenAutomaton[Any] | None, *, stream: bool
    ) -> Iterator[RequestOutput]: ...
    def outputs_of_branches(
        self,
        prompts: Sequence[Messages],
        params: SamplingParams,
        *,
        branch_mode: str | None,
        max_parallel: int | None,
        predicted: Sequence[int],
        stream: bool,
    ) -> Iterator[RequestOutput]: ...


@dataclass(frozen=True)
class SkeletonEvent:
    """Text as it comes."""

    point: int | None  # the id of the point that it belongs to; None: the skeleton
    text: str  # new since the last event of the same point
    num_tokens: int  # new, too
    step: int  # of the engine, counted from the beginning of the answer
    finished: bool


@dataclass
class PointOutput:
    """A point of the answer."""

    id: int
    title: str
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass
class SkeletonMetrics:
    """What an answer took: steps of the engine, tokens and seconds, for the skeleton and for its points."""

    skeleton_steps: int = 0
    skeleton_tokens: int = 0
    skeleton_seconds: float = 0.0
    point_steps: int = 0
    point_tokens: int = 0
    point_seconds: float = 0.0


@dataclass
class SkeletonOutput:
    """An answer by its points; a direct one has none."""

    question: str
    written: str  # the skeleton's text, which can be given as `skeleton` to expand it again
    skeleton: Skeleton
    points: list[PointOutput]
    text: str
    metrics: SkeletonMetrics = field(repr=False)


def knows_plans(tokenizer: Tokenizer) -> bool:
    """Whether the markers of the plan protocol are tokens: then the model was trained to write plans."""
    return len(tokenizer.encode(END, add_special_tokens=False)) == 1


class SkeletonOfThought:
    """Asks an engine for a skeleton, then for its points, wave by wave: a wave's points depend on earlier ones only.

    Args:
        engine: an `LLM` with a tokenizer and a chat template.
        protocol: "plan" (the plan protocol, kept to by its grammar), "outline" (a numbered list), or "auto": the plan
            protocol where the tokenizer has its markers.

    Raises:
        ValueError: there is no such protocol, or the engine has no tokenizer.
    """

    def __init__(self, engine: Engine, protocol: str = "auto") -> None:
        if protocol not in (*PROTOCOLS, "auto"):
            raise ValueError(f"protocol must be one of auto, {', '.join(PROTOCOLS)}, got {protocol!r}")
        self._engine = engine
        self._tokenizer = engine.get_tokenizer()
        self._end = self._tokenizer.encode(END, add_special_tokens=False)
        is_plan = protocol == "plan" or (protocol == "auto" and knows_plans(self._tokenizer))
        self.prompts: SkeletonPrompts = PlanPrompts() if is_plan else OutlinePrompts()
        self._automaton: TokenAutomaton[Any] | None = None

    def answer(
        self,
        question: str,
        sampling_params: SamplingParams | None = None,
        *,
        branch_mode: str | None = None,
        max_parallel_branches: int | None = None,
        skeleton: str | None = None,
        on_event: Callable[[SkeletonEvent], None] | None = None,
    ) -> SkeletonOutput:
        """See `LLM.skeleton_of_thought`."""
        params = sampling_params or self._engine.default_sampling_params(max_tokens=_MOST_POINT_TOKENS)
        if params.n != 1:
            raise ValueError(f"n={params.n}: a skeleton is expanded once")
        budget = _MOST_POINT_TOKENS if params.max_tokens is None else params.max_tokens
        metrics = SkeletonMetrics()
        watch = _Watch(self._engine, on_event)
        written = self._write_skeleton(question, params, watch) if skeleton is None else skeleton
        metrics.skeleton_steps, metrics.skeleton_tokens, metrics.skeleton_seconds = watch.lap()
        found = self.prompts.parse(written, budget)
        texts: dict[int, str] = {}
        points: dict[int, PointOutput] = {}
        for wave in () if found.is_direct else found.waves():
            prompts = [self.prompts.ask_point(question, written, found, point, texts) for point in wave]
            outputs = self._engine.outputs_of_branches(
                prompts, self.params_of_points(params), branch_mode=branch_mode, max_parallel=max_parallel_branches,
                predicted=[point.length or budget for point in wave], stream=on_event is not None,
            )  # fmt: skip
            for point, completion in zip(wave, watch.collect(outputs, wave), strict=True):
                texts[point.id] = completion.text
                points[point.id] = PointOutput(
                    point.id, point.title, point_text(completion.text), completion.token_ids, completion.finish_reason
                )
        metrics.point_steps, metrics.point_tokens, metrics.point_seconds = watch.lap()
        ordered = [points[point.id] for point in found.points]
        return SkeletonOutput(question, written, found, ordered, found.merge(texts), metrics)

    def _write_skeleton(self, question: str, params: SamplingParams, watch: _Watch) -> str:
        limited = dataclasses.replace(params, max_tokens=MOST_SKELETON_TOKENS)
        if self.prompts.is_plan and self._automaton is None:
            self._automaton = SkeletonGrammar().automaton(self._engine.vocabulary, self._engine.eos_token_ids)
        outputs = self._engine.outputs_of_chat(
            self.prompts.ask_skeleton(question), limited, self._automaton, stream=watch.on_event is not None
        )
        return watch.collect(outputs, [None])[0].text

    def params_of_points(self, params: SamplingParams) -> SamplingParams:
        """A point is over with its [END], where that is one token."""
        if not self.prompts.is_plan or len(self._end) != 1:
            return params
        stops = dict.fromkeys([*(params.stop_token_ids or ()), *self._end])
        return dataclasses.replace(params, stop_token_ids=list(stops))


class _Watch:
    """Follows outputs: tells of what is new, puts completions together, and counts."""

    def __init__(self, engine: Engine, on_event: Callable[[SkeletonEvent], None] | None) -> None:
        self.on_event = on_event
        self._engine = engine
        self._first_step = self._steps = engine.get_metrics().num_steps_total
        self._tokens = 0
        self._since = time.perf_counter()

    def collect(self, outputs: Iterator[RequestOutput], of: Sequence[SkeletonPoint | None]) -> list[CompletionOutput]:
        """The completions of a request, whole, whether they come in parts or not."""
        whole = [CompletionOutput(index, "", []) for index in range(len(of))]
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            for part in output.outputs:
                completion, point = whole[part.index], of[part.index]
                completion.text += part.text
                completion.token_ids += part.token_ids
                completion.finish_reason, completion.stop_reason = part.finish_reason, part.stop_reason
                self._tokens += len(part.token_ids)
                if self.on_event is not None:
                    step = self._engine.get_metrics().num_steps_total - self._first_step
                    number = None if point is None else point.id
                    self.on_event(SkeletonEvent(number, part.text, len(part.token_ids), step, part.finished))
        return whole

    def lap(self) -> tuple[int, int, float]:
        """Steps, tokens and seconds since the last lap."""
        steps, now = self._engine.get_metrics().num_steps_total, time.perf_counter()
        found = (steps - self._steps, self._tokens, now - self._since)
        self._steps, self._tokens, self._since = steps, 0, now
        return found
