"""One answer by Skeleton-of-Thought as a state machine: a plan, then its points, wave by wave."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.frontend.jobs import Answer, Item
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.skeleton.output import PointOutput, SkeletonEvent, SkeletonMetrics, SkeletonOutput
from jaxinfer.skeleton.plan import Skeleton, SkeletonPoint, point_text
from jaxinfer.skeleton.prompts import SkeletonPrompts

MOST_SKELETON_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class Ways:
    """Settings for the points of an answer.

    Attributes:
        params: sampling parameters of every point.
        budget: most tokens of a point that a plan may state, and the expected length where it states none.
        branch_mode, max_parallel: as for `LLM.generate_branches`.
    """

    params: SamplingParams
    budget: int
    branch_mode: str | None = None
    max_parallel: int | None = None


class SkeletonJob:
    """Job of one question, from its plan to its answer.

    Args:
        inputs: makes requests.
        prompts: of the protocol.
        params: sampling parameters of the plan.
        grammar: the plan's; None: any text is allowed.
        written: the text of a given plan; None: the model writes one.
        on_event: called with new text as it lands.
        num_steps: returns the engine's number of steps so far.

    Raises:
        ValueError: the plan cannot be asked for, or the parameters of its points cannot be served.
    """

    name = "a skeleton"

    def __init__(
        self,
        inputs: InputProcessor,
        prompts: SkeletonPrompts,
        question: str,
        params: SamplingParams,
        ways: Ways,
        *,
        grammar: StructuredOutputsParams | None,
        written: str | None,
        on_event: Callable[[SkeletonEvent], object] | None,
        num_steps: Callable[[], int],
    ) -> None:
        self._inputs, self._prompts, self._question, self._ways = inputs, prompts, question, ways
        self._params = dataclasses.replace(params, max_tokens=MOST_SKELETON_TOKENS, structured_outputs=grammar)
        self._written, self._on_event = written, on_event
        self._num_steps = num_steps
        self._metrics = SkeletonMetrics()
        self._skeleton: Skeleton | None = None
        self._waves: list[list[SkeletonPoint]] = []  # not yet asked for
        self._asked: list[SkeletonPoint | None] = []  # what the current request writes; None: the plan
        self._whole: list[CompletionOutput] = []  # output of each so far
        self._is_finished = False
        self._texts: dict[int, str] = {}
        self._points: dict[int, PointOutput] = {}
        inputs.check_params(ways.params, 0)
        self._first: Sequence[Item] = ()
        if written is None:
            prompt = inputs.render(prompts.ask_skeleton(question), 0, {})
            self._first = inputs.requests([prompt], self._params, stream=self.stream)

    @property
    def stream(self) -> bool:
        return self._on_event is not None

    def begin(self) -> Sequence[Item] | Answer[SkeletonOutput]:
        """Ask for the plan, or for the first points of one that is given."""
        self._first_step = self._last_step = self._num_steps()
        self._num_tokens, self._since = 0, time.perf_counter()
        if self._written is not None:
            return self._expand(self._written)
        self._expect([None])
        return self._first

    def take(self, outputs: Sequence[RequestOutput]) -> Sequence[Item] | Answer[SkeletonOutput]:
        """Collect new outputs; once the plan or a wave is whole, ask for the next wave."""
        for output in outputs:
            self._collect(output)
        if not self._is_finished:
            return ()
        if self._skeleton is None:
            return self._expand(self._whole[0].text)
        for point, completion in zip(self._asked, self._whole, strict=True):
            assert point is not None
            self._texts[point.id] = completion.text
            self._points[point.id] = PointOutput(
                point.id, point.title, point_text(completion.text), completion.token_ids, completion.finish_reason
            )
        return self._next_wave()

    def abort(self) -> None:
        """Abort nothing: the job starts no requests itself."""

    def _expand(self, written: str) -> Sequence[Item] | Answer[SkeletonOutput]:
        metrics = self._metrics
        metrics.skeleton_steps, metrics.skeleton_tokens, metrics.skeleton_seconds = self._lap()
        self._written, self._skeleton = written, self._prompts.parse(written, self._ways.budget)
        self._waves = [] if self._skeleton.is_direct else [list(wave) for wave in self._skeleton.waves()]
        return self._next_wave()

    def _next_wave(self) -> Sequence[Item] | Answer[SkeletonOutput]:
        skeleton, written, ways = self._skeleton, self._written, self._ways
        assert skeleton is not None and written is not None
        if not self._waves:
            metrics = self._metrics
            metrics.point_steps, metrics.point_tokens, metrics.point_seconds = self._lap()
            ordered = [self._points[point.id] for point in skeleton.points]
            text = skeleton.merge(self._texts)
            return Answer(SkeletonOutput(self._question, written, skeleton, ordered, text, metrics))
        wave = self._waves.pop(0)
        conversations = [
            self._prompts.ask_point(self._question, written, skeleton, point, self._texts) for point in wave
        ]
        tokens = [self._inputs.render(each, i, {})["prompt_token_ids"] for i, each in enumerate(conversations)]
        self._expect(wave)
        group = self._inputs.branches(
            [], tokens, ways.params, branch_mode=ways.branch_mode, max_parallel=ways.max_parallel,
            predicted=[point.length or ways.budget for point in wave], stream=self.stream,
        )  # fmt: skip
        return [group]

    def _expect(self, asked: Sequence[SkeletonPoint | None]) -> None:
        self._asked, self._is_finished = list(asked), False
        self._whole = [CompletionOutput(index, "", []) for index in range(len(asked))]

    def _collect(self, output: RequestOutput) -> None:
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id} failed: {output.error}")
        for part in output.outputs:
            completion, point = self._whole[part.index], self._asked[part.index]
            completion.text += part.text
            completion.token_ids += part.token_ids
            completion.finish_reason, completion.stop_reason = part.finish_reason, part.stop_reason
            self._num_tokens += len(part.token_ids)
            if self._on_event is not None:
                step = self._num_steps() - self._first_step
                number = None if point is None else point.id
                self._on_event(
                    SkeletonEvent(number, part.text, len(part.token_ids), step, part.finished, part.finish_reason)
                )
        self._is_finished |= output.finished

    def _lap(self) -> tuple[int, int, float]:
        """Return steps, tokens and seconds since the last lap."""
        steps, now = self._num_steps(), time.perf_counter()
        found = (steps - self._last_step, self._num_tokens, now - self._since)
        self._last_step, self._num_tokens, self._since = steps, 0, now
        return found
