"""`LLM`: the engine as users meet it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.branching.beam_search import BeamSearchParams
from jaxinfer.build import build_client
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.frontend.beam_search import BeamSearchJob
from jaxinfer.frontend.progress import CompileNotice
from jaxinfer.frontend.prompts import as_prompt_list, is_conversation
from jaxinfer.models.config import ModelConfig
from jaxinfer.outputs import BeamSearchOutput, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.skeleton.answer import SkeletonEvent, SkeletonOfThought, SkeletonOutput
from jaxinfer.strategies.draft_options import SpeculativeConfig
from jaxinfer.tokenizer import Tokenizer

_DRAWN = 72  # characters of a node of the cache that are drawn


class LLM:
    """Text from a language model: many prompts at once, batched continuously over one KV pool.

    Args:
        model: a converted directory, a Hugging Face directory, a hub id or the name of an embedded checkpoint ("tiny",
            "tiny-draft"); None is "tiny".
        tokenizer: directory of the tokenizer files, if not the model's.
        skip_tokenizer_init: serve token-id prompts only.
        dtype: of weights and KV: "auto" (bfloat16 on GPU, float32 on CPU), "float32", "bfloat16" or "float16".
        max_model_len: most tokens of prompt and output together; None: what the model was made for.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in one step, prompts' and outputs' together.
        page_size: tokens per KV page, a power of two; by default a block of a block-diffusion model where that is more.
        kv_cache_tokens: size of the KV pool; None: from the device's memory.
        gpu_memory_utilization: share of a GPU's memory that the engine takes for weights, KV pool and workspace; 3% of
            that stay free, CUDA's context comes on top, and more than 0.97 is taken as 0.97. JAX takes this share when
            it starts, which the first LLM sees to. Where JAX runs with less already (a warning says so), or the
            environment variable XLA_CLIENT_MEM_FRACTION gives it less, that is what the engine takes.
        enable_prefix_caching: keep what was computed, and start requests behind the longest beginning that is kept.
        speculative_config: how tokens are drafted, a `SpeculativeConfig` or a dict of its fields; None: one token is
            decoded after the other. It changes no token.
        diffusion_config: of a diffusion model, how its blocks are denoised, a `DiffusionConfig` or a dict of its
            fields; None: the defaults. Its steps compute a block for every request that runs, so `max_num_seqs` is at
            most `max_num_batched_tokens` over the block's size.
        branch_mode: how launches read what sequences of one request (samples, branches) begin with: "in_one_sequence"
            once for all of them, "batching" once for each. It changes no token.
        scheduling_policy: "fcfs" or "priority".
        tensor_parallel_size: devices that share every layer.
        attention_backend: "auto", "xla" or "pallas" (a kernel for Hopper GPUs).
        seed: of requests that bring no seed of their own.
        strict_config: refuse every unknown field of a `config.json`, also one that the reference cannot read.
        ignore_config_fields: names of unknown fields to ignore, of the model's `config.json` and a drafter's; you know
            that they change no output.
        warm_up: "background": compile all programs that requests can need while they run, the likely ones first; False:
            when they are needed. The method of that name compiles them all before it returns.

    Attributes:
        client: the engine's client; `llm.core` is the engine itself.
        memory_budget: where the device's memory goes.

    Raises:
        FileNotFoundError, CheckpointError, UnsupportedConfigError: the checkpoint cannot be used, and why.
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        dtype: Any = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        page_size: int = 16,
        kv_cache_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        diffusion_config: DiffusionConfig | Mapping[str, Any] | None = None,
        branch_mode: str = "in_one_sequence",
        scheduling_policy: str = "fcfs",
        tensor_parallel_size: int = 1,
        attention_backend: str = "auto",
        seed: int = 0,
        strict_config: bool = False,
        ignore_config_fields: Sequence[str] = (),
        warm_up: str | bool = False,
    ) -> None:
        self.client, self.memory_budget = build_client(
            model=model, tokenizer=tokenizer, skip_tokenizer_init=skip_tokenizer_init, dtype=dtype,
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size, kv_cache_tokens=kv_cache_tokens, gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching, speculative_config=speculative_config,
            diffusion_config=diffusion_config, branch_mode=branch_mode, scheduling_policy=scheduling_policy,
            tensor_parallel_size=tensor_parallel_size, attention_backend=attention_backend, seed=seed,
            strict_config=strict_config, ignore_config_fields=ignore_config_fields, warm_up=warm_up,
        )  # fmt: skip
        self._outbox = self.client.inbox()  # for callers of `step`
        self._skeletons: dict[str, SkeletonOfThought] = {}

    @property
    def core(self) -> EngineCore:
        """The engine."""
        return self.client.core

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if the engine has one."""
        return self.client.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The model's architecture."""
        return self.client.core.model_config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The checkpoint's `generation_config.json`."""
        return self.client.inputs.generation_config

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: the generation config's, or else the model config's."""
        return self.client.eos_token_ids

    @property
    def vocabulary(self) -> Vocabulary:
        """What each token adds to a text.

        Raises:
            ValueError: the engine has no tokenizer, or one whose tokens' bytes are not known here.
        """
        return self.client.vocabulary

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs stand in the order of the prompts.

        Args:
            prompts: str, list[int] or {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: for all prompts, or one for each; None: `default_sampling_params()`.
            use_tqdm: show a progress bar.
            priority: with `scheduling_policy="priority"`, of all prompts or of each; the lowest runs first.

        Raises:
            ValueError: a prompt, its parameters or its priority cannot be served; nothing has run then.
        """
        client, items = self.client, as_prompt_list(prompts)
        requests = client.inputs.requests(items, sampling_params, stream=False, priority=priority)
        return client.run(requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several: lists of {"role": ..., "content": ...} messages.

        Args:
            messages: one conversation, or a list of conversations.
            template_arguments: passed to the checkpoint's chat template.

        Raises:
            ValueError: as for `generate`; or there is no chat template, or it refuses the messages.
        """
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages must be a conversation or a list of conversations, got {messages!r}")
        conversations = [messages] if is_conversation(messages) else list(messages)
        inputs = self.client.inputs
        prompts = [inputs.render(c, i, template_arguments) for i, c in enumerate(conversations)]
        return self.client.run(inputs.requests(prompts, sampling_params, stream=False), use_tqdm=use_tqdm)

    def stream(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Complete prompts and yield what is new as it comes: text and token ids since the last output of a request.

        Several prompts run at once; `request_id` tells whose an output is (ids grow in the order of the prompts).
        A conversation (a list of messages) is a prompt too. Leaving the loop early aborts what still runs.

        Raises:
            ValueError: as for `generate`, at the call.
        """
        if is_conversation(prompts):
            prompts = [prompts]
        items = as_prompt_list(prompts)
        inputs = self.client.inputs
        items = [inputs.render(p, i, {}) if is_conversation(p) else p for i, p in enumerate(items)]
        requests = inputs.requests(items, sampling_params, stream=True)
        self.core.check(requests)
        return self.client.outputs(requests, CompileNotice(), stream=True)

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
        group = self.client.inputs.branches(
            prefix, suffixes, sampling_params, branch_mode=branch_mode, max_parallel=max_parallel_branches,
            predicted=predicted_lengths, stream=False,
        )  # fmt: skip
        return self.client.run([group], use_tqdm=use_tqdm)[0]

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
        group = self.client.inputs.branches(
            prefix, suffixes, sampling_params, branch_mode=branch_mode, max_parallel=max_parallel_branches,
            predicted=predicted_lengths, stream=True,
        )  # fmt: skip
        self.core.check([group])
        return self.client.outputs([group], CompileNotice(), stream=True)

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The most likely continuations of prompts that beam search finds; outputs stand in the order of the prompts.

        Beams are sequences that share the pages of what they have in common: one that forks copies less than a page,
        and one that is given up gives its own back.

        Args:
            prompts: as for `generate`.

        Raises:
            ValueError: a prompt cannot be served, or there are more end-of-sequence tokens than can be looked for.
        """
        client = self.client
        job = BeamSearchJob(client.core, client.inputs, client.tokenizer, prompts, params)
        return client.answer(job, CompileNotice())

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
            self._skeletons[protocol] = SkeletonOfThought(self.client, protocol)
        return self._skeletons[protocol].answer(
            question, sampling_params, branch_mode=branch_mode, max_parallel_branches=max_parallel_branches,
            skeleton=skeleton, on_event=on_event,
        )  # fmt: skip

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        arrival_time: float | None = None,
        priority: int | None = None,
    ) -> str:
        """Queue one prompt for those who call `step` themselves; returns its request id.

        Args:
            prompt: as for `generate`, or a conversation.
            stream: `step` returns what is new as it comes, not the whole at the end.
            arrival_time: when the request came, by `time.perf_counter`; None: now.
            priority: as for `generate`.

        Raises:
            ValueError: as for `generate`; nothing is queued then.
        """
        if is_conversation(prompt):
            prompt = self.client.inputs.render(prompt, 0, {})
        [request] = self.client.inputs.requests([prompt], sampling_params, stream=stream, priority=priority)
        if arrival_time is not None:
            for sequence in request.members if isinstance(request, RequestGroup) else [request]:
                sequence.metrics.arrival_time = arrival_time
        self.client.add([request], self._outbox, stream=stream)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine, if there is work; what came of requests that `add_request` queued."""
        self.client.step()
        return self._outbox.take()

    def has_unfinished_requests(self) -> bool:
        """Whether there is a request, of any caller, that has not come to its end."""
        return self.core.has_unfinished_requests()

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's `generation_config.json` below what is given here."""
        return self.client.default_sampling_params(**given)

    def warm_up(self, use_tqdm: bool = True) -> None:
        """Compile every program that requests can need, with a progress line that names it.

        Without it they are compiled when they are first needed. Either way they are kept on disk for the next process.
        """
        self.core.warm_up(progress=use_tqdm)

    def abort(self, request_id: str) -> bool:
        """End an unfinished request; False if there is none of that id."""
        return bool(self.client.abort(request_id))

    def abort_all(self) -> int:
        """End all unfinished requests, of every caller; returns how many there were."""
        return len(self.core.abort(*self.core.scheduler.requests))

    def reset_prefix_cache(self) -> bool:
        """Forget the prefixes that are cached; False if unfinished requests use some of them, which stay."""
        return self.core.reset_prefix_cache()

    def draw_prefix_cache(self) -> str:
        """The tree of cached prefixes with their text, or token ids where there is no tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return self.core.draw_prefix_cache()

        def show(tokens: list[int]) -> str:
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            return repr(text if len(text) <= _DRAWN else f"{text[: _DRAWN // 2]} … {text[-_DRAWN // 2 :]}")

        return self.core.draw_prefix_cache(show)

    def get_metrics(self) -> EngineMetrics:
        """Counters since the start and gauges of now."""
        return self.core.get_metrics()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: this engine has none.
        """
        return self.client.get_tokenizer()
