"""What `LLM` offers beside single sequences: branches of one beginning, and answers that are made of them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxinfer.branching.beam_search import BeamSearch, BeamSearchParams
from jaxinfer.constraints.automaton import TokenAutomaton
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.frontend.output_processor import OutputProcessor
from jaxinfer.frontend.progress import CompileNotice, CompileWatcher
from jaxinfer.frontend.prompts import TokenizedPrompt, as_prompt_list
from jaxinfer.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.skeleton.answer import SkeletonEvent, SkeletonOfThought, SkeletonOutput
from jaxinfer.strategies.beams import BeamRun
from jaxinfer.tokenizer import Tokenizer


class BranchMethods(ABC):
    """Methods of `LLM`."""

    def __init__(
        self, core: EngineCore, inputs: InputProcessor, processor: OutputProcessor, tokenizer: Tokenizer | None
    ) -> None:
        self.core, self.tokenizer = core, tokenizer
        self._inputs, self._processor = inputs, processor
        core.landing_listeners.append(processor.process)
        self._skeletons: dict[str, SkeletonOfThought] = {}
        constraints = core.constraints
        self._vocabulary = None if constraints is None else constraints.vocabulary

    @abstractmethod
    def _run(self, requests: Sequence[Request | RequestGroup], use_tqdm: bool) -> list[RequestOutput]: ...

    @abstractmethod
    def _steps(
        self, requests: Sequence[Request | RequestGroup], watcher: CompileWatcher, *, stream: bool
    ) -> Iterator[RequestOutput]: ...

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def get_metrics(self) -> EngineMetrics: ...

    @abstractmethod
    def default_sampling_params(self, **given: Any) -> SamplingParams: ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: the generation config's, or else the model config's."""
        return self._inputs.eos_token_ids

    @property
    def vocabulary(self) -> Vocabulary:
        """What each token adds to a text.

        Raises:
            ValueError: the engine has no tokenizer, or one whose tokens' bytes are not known here.
        """
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.from_tokenizer(self.get_tokenizer(), self._inputs.model_config.vocab_size)
        return self._vocabulary

    def generate_branches(
        self,
        prefix: Any,
        suffixes: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        branch_mode: str | None = None,
        *,
        max_parallel_branches: int | None = None,
        predicted_lengths: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput:
        """Complete `prefix + suffix` for every suffix at once; `outputs[i]` is what follows `suffixes[i]`.

        What the branches share is computed and kept once. Each gives the tokens that `generate` gives for its prompt
        alone; where one set of parameters with a seed serves all, branch i has the seed + i.

        Args:
            prefix: text, a list of token ids, or a dict with "prompt" or "prompt_token_ids".
            suffixes: of each branch, text or token ids as the prefix is; it may be empty.
            sampling_params: for all branches, or one for each.
            branch_mode: "in_one_sequence" or "batching"; None: the engine's.
            max_parallel_branches: most branches that run at once; None: all.
            predicted_lengths: tokens that each branch is expected to have: the longest start first.

        Raises:
            ValueError: as for `generate`; or prefix and suffixes do not go together.
        """
        group = self._inputs.branches(
            prefix, suffixes, sampling_params, branch_mode=branch_mode, max_parallel=max_parallel_branches,
            predicted=predicted_lengths, stream=False,
        )  # fmt: skip
        return self._run([group], use_tqdm)[0]

    def stream_branches(
        self,
        prefix: Any,
        suffixes: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        branch_mode: str | None = None,
        *,
        max_parallel_branches: int | None = None,
        predicted_lengths: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate_branches`, and yields what is new as it comes: `outputs[0].index` tells of which branch."""
        group = self._inputs.branches(
            prefix, suffixes, sampling_params, branch_mode=branch_mode, max_parallel=max_parallel_branches,
            predicted=predicted_lengths, stream=True,
        )  # fmt: skip
        self.core.check([group])
        return self._steps([group], CompileNotice(), stream=True)

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The most likely continuations of prompts that beam search finds; outputs stand in the order of the prompts.

        Beams are sequences that share the pages of what they have in common: one that forks copies less than a page,
        and one that is given up gives its own back.

        Args:
            prompts: as for `generate`.

        Raises:
            ValueError: a prompt cannot be served, or there are more end-of-sequence tokens than can be looked for.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, got {params!r}")
        if self._inputs.model_config.mask_token_id is not None:
            raise ValueError("beam search goes from token to token, and a diffusion model makes blocks of them at once")
        limits = self._inputs.config
        runs: list[tuple[TokenizedPrompt, BeamRun]] = []
        try:
            for number, prompt in self._inputs.tokenized(as_prompt_list(prompts)):
                while runs and sum(not run.is_done for _, run in runs) >= limits.max_num_seqs // params.beam_width:
                    self.core.step()
                most = min(params.max_tokens, limits.max_model_len - len(prompt.token_ids))
                search = BeamSearch(dataclasses.replace(params, max_tokens=most), self.eos_token_ids)
                runs.append((prompt, BeamRun(self.core, number, prompt.token_ids, search)))
            while not all(run.is_done for _, run in runs):
                self.core.step()
        finally:
            for _, run in runs:
                run.abort()
        tokenizer = self.tokenizer
        outputs: list[BeamSearchOutput] = []
        for index, (prompt, run) in enumerate(runs):
            if run.error is not None:
                raise RuntimeError(f"beam search for prompt {index} failed: {run.error}")
            sequences = []
            for found in run.search.hypotheses:
                tokens, text = list(found.tokens), ""
                if tokenizer is not None:
                    text = tokenizer.decode_after(prompt.token_ids, tokens[:-1] if found.ended else tokens)
                reason = "stop" if found.ended else "length"
                sequences.append(BeamSearchSequence(tokens, text, found.logprob, found.score, reason))
            outputs.append(BeamSearchOutput(prompt.text, prompt.token_ids, sequences))
        return outputs

    def skeleton_of_thought(
        self,
        question: str,
        sampling_params: SamplingParams | None = None,
        *,
        branch_mode: str | None = None,
        protocol: str = "auto",
        max_parallel_branches: int | None = None,
        skeleton: str | None = None,
        on_event: Callable[[SkeletonEvent], None] | None = None,
    ) -> SkeletonOutput:
        """Answer a question by a plan whose points are written at the same time, as branches of one conversation.

        Args:
            question: what the user asks.
            sampling_params: of the plan and of every point (point i of a wave has the seed + i); `max_tokens` is the
                most that a point may have. None: the checkpoint's defaults.
            branch_mode: "in_one_sequence" or "batching"; None: the engine's.
            protocol: "plan" ([PLAN] or [DIRECT], kept to by its grammar), "outline" (a numbered list, for any chat
                model), or "auto": "plan" where the tokenizer has its markers.
            max_parallel_branches: most points that are written at once; None: all.
            skeleton: the text of a plan, to expand instead of asking for one.
            on_event: is told of text as it comes.

        Raises:
            ValueError: there is no tokenizer or no chat template, or a setting is out of range.
        """
        if protocol not in self._skeletons:
            self._skeletons[protocol] = SkeletonOfThought(self, protocol)
        return self._skeletons[protocol].answer(
            question, sampling_params, branch_mode=branch_mode, max_parallel_branches=max_parallel_branches,
            skeleton=skeleton, on_event=on_event,
        )  # fmt: skip

    def outputs_of_chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams,
        constraint: TokenAutomaton[Any] | None = None,
        *,
        stream: bool,
    ) -> Iterator[RequestOutput]:
        """What comes of one conversation; `constraint` says which tokens its answer may have."""
        prompt = self._inputs.render(messages, 0, {})
        requests = self._inputs.requests([prompt], params, stream=stream, constraint=constraint)
        return self._steps(requests, CompileNotice(), stream=stream)

    def outputs_of_branches(
        self,
        prompts: Sequence[Sequence[Any]],
        params: SamplingParams,
        *,
        branch_mode: str | None,
        max_parallel: int | None,
        predicted: Sequence[int],
        stream: bool,
    ) -> Iterator[RequestOutput]:
        """What comes of several conversations that begin with the same turns."""
        tokens = [self._inputs.render(messages, i, {})["prompt_token_ids"] for i, messages in enumerate(prompts)]
        group = self._inputs.branches(
            [], tokens, params, branch_mode=branch_mode, max_parallel=max_parallel, predicted=predicted, stream=stream
        )
        return self._steps([group], CompileNotice(), stream=stream)
