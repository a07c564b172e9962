"""Skeleton-of-Thought: a plan, then its points decoded in parallel, then one answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.frontend.client import EngineClient
from jaxinfer.frontend.progress import CompileNotice
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.skeleton.grammar import SkeletonGrammar
from jaxinfer.skeleton.job import MOST_SKELETON_TOKENS, SkeletonJob, Ways
from jaxinfer.skeleton.output import PointOutput, SkeletonEvent, SkeletonMetrics, SkeletonOutput
from jaxinfer.skeleton.plan import DIRECT, END, PLAN, knows_plans
from jaxinfer.skeleton.prompts import PROTOCOLS, OutlinePrompts, PlanPrompts, SkeletonPrompts

__all__ = [
    "MOST_SKELETON_TOKENS", "PointOutput", "SkeletonEvent", "SkeletonMetrics", "SkeletonOfThought", "SkeletonOutput",
    "knows_plans",
]  # fmt: skip

_MOST_POINT_TOKENS = 256


class SkeletonOfThought:
    """Maker of answers from a skeleton and its points, wave by wave: points depend on earlier waves only.

    Args:
        client: of an engine with a tokenizer and a chat template.
        protocol: "plan" (the plan protocol, enforced by a grammar), "outline" (a numbered list), or "auto": "plan"
            where the tokenizer has its markers, else "outline".

    Raises:
        ValueError: there is no such protocol, or the engine has no tokenizer.
    """

    def __init__(self, client: EngineClient, protocol: str = "auto") -> None:
        if protocol not in (*PROTOCOLS, "auto"):
            raise ValueError(f"protocol must be one of auto, {', '.join(PROTOCOLS)}, got {protocol!r}")
        self._client = client
        tokenizer = client.get_tokenizer()
        self._end = tokenizer.encode(END, add_special_tokens=False)
        self._markers = {
            tag: tokens[0]
            for tag in (PLAN, DIRECT, END)
            if len(tokens := tokenizer.encode(tag, add_special_tokens=False)) == 1
        }
        is_plan = protocol == "plan" or (protocol == "auto" and knows_plans(tokenizer))
        self.prompts: SkeletonPrompts = PlanPrompts() if is_plan else OutlinePrompts()
        self._grammar: StructuredOutputsParams | None = None

    def job(
        self,
        question: str,
        sampling_params: SamplingParams | None = None,
        *,
        branch_mode: str | None = None,
        max_parallel_branches: int | None = None,
        skeleton: str | None = None,
        on_event: Callable[[SkeletonEvent], object] | None = None,
    ) -> SkeletonJob:
        """Return the job of one answer; see `LLM.skeleton_of_thought`.

        Raises:
            ValueError: a setting is out of range.
        """
        params = sampling_params or self._client.default_sampling_params(max_tokens=_MOST_POINT_TOKENS)
        if params.n != 1:
            raise ValueError(f"n={params.n}: a skeleton is expanded once")
        if self.prompts.is_plan and self._grammar is None and skeleton is None:
            self._grammar = StructuredOutputsParams(grammar=SkeletonGrammar().lark(self._markers))
        budget = _MOST_POINT_TOKENS if params.max_tokens is None else params.max_tokens
        metrics = self._client.core.metrics
        return SkeletonJob(
            self._client.inputs, self.prompts, question, params,
            Ways(self.params_of_points(params), budget, branch_mode, max_parallel_branches),
            grammar=self._grammar, written=skeleton, on_event=on_event, num_steps=lambda: metrics.num_steps_total,
        )  # fmt: skip

    def answer(self, question: str, sampling_params: SamplingParams | None = None, **options: Any) -> SkeletonOutput:
        """Answer a question; `options` are those of `job`."""
        return self._client.answer(self.job(question, sampling_params, **options), CompileNotice())

    def params_of_points(self, params: SamplingParams) -> SamplingParams:
        """Return parameters of points, with [END] as a stop token where it is one token."""
        if not self.prompts.is_plan or len(self._end) != 1:
            return params
        stops = dict.fromkeys([*(params.stop_token_ids or ()), *self._end])
        return dataclasses.replace(params, stop_token_ids=list(stops))
