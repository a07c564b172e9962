"""`LLM`: the engine for scripts and notebooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from jaxinfer.branching.beam_search import BeamSearchParams
from jaxinfer.build import build_client
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.frontend.beam_search import BeamSearchJob
from jaxinfer.frontend.progress import CompileNotice
from jaxinfer.frontend.prompts import as_prompt_list, is_conversation
from jaxinfer.frontend.scoring import ScoringMethods
from jaxinfer.frontend.weights_methods import WeightsMethods
from jaxinfer.models.config import ModelConfig
from jaxinfer.outputs import BeamSearchOutput, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.skeleton.answer import SkeletonEvent, SkeletonOfThought, SkeletonOutput
from jaxinfer.strategies.draft_options import SpeculativeConfig
from jaxinfer.tokenizer import Tokenizer


class LLM(WeightsMethods, ScoringMethods):
    """Inference engine for a language model: many prompts at once, with continuous batching over one KV pool.

    One thread at a time may use it; several can share an `AsyncLLM`.

    Args:
        model: a converted directory, a Hugging Face directory, a hub id or the name of an embedded checkpoint ("tiny",
            "tiny-draft", "tiny-diffusion"); None is "tiny". Or a model by its arrays, a module or a pair of
            configuration and state: they are used as they are where type and placement fit, and never written over.
        tokenizer: directory of the tokenizer files, if not the model's.
        skip_tokenizer_init: load no tokenizer; prompts are token ids then.
        dtype: of weights and KV: "auto" (bfloat16 on GPU, float32 on CPU), "float32", "bfloat16" or "float16".
        max_model_len: most tokens of a request, prompt and output together; None: as many as the model has positions.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in one step, of prompts and outputs together.
        page_size: tokens per KV page, a power of two. A block-diffusion model with larger blocks takes its block size
            by default.
        kv_cache_tokens: size of the KV pool in tokens; None: as many as fit in the device's memory.
        gpu_memory_utilization: share of a GPU's memory for weights, KV pool and workspace, capped at 0.97. 3% of it
            stay free; CUDA's context comes on top. The first LLM lets JAX start with this share. If JAX runs with less
            already (a warning says so), or the environment variable XLA_CLIENT_MEM_FRACTION gives it less, the engine
            takes that.
        enable_prefix_caching: cache the KV of prefixes. A request resumes after its longest cached prefix.
        prefix_cache_tokens: most tokens that are cached; None: as many as the KV pool has room for.
        prefix_cache_policy: which cached prefixes are evicted first: "lru", "lfu", "fifo" or "priority".
        speculative_config: speculative decoding, a `SpeculativeConfig` or a dict of its fields; None: off. It changes
            no token.
        diffusion_config: how a diffusion model denoises, a `DiffusionConfig` or a dict of its fields; None: the
            defaults. A step computes a whole block for every running request, so `max_num_seqs` is at most
            `max_num_batched_tokens` over the block size.
        branch_mode: how launches read the prefix that sequences of one request (samples, branches) share:
            "in_one_sequence" once for all of them, "batching" once for each, as diffusion models always do. It changes
            no token.
        scheduling_policy: "fcfs" or "priority".
        tensor_parallel_size: number of devices over which every layer is sharded.
        attention_backend: "auto", "xla" or "pallas" (a kernel for Hopper GPUs).
        seed: for requests without a seed of their own.
        logprobs_mode: "raw_logprobs" of the model's own distribution, or "processed_logprobs" of the one that a token
            was drawn from: after penalties, biases and temperature, over what top-k, top-p and min-p keep.
        strict_config: refuse every unknown field of a `config.json`, even one that the reference does not read.
        ignore_config_fields: unknown fields to ignore in the model's and the drafter's `config.json`; for fields that
            you know change no output.
        warm_up: "background": compile all programs that requests can need while requests run, the likely ones first;
            False: compile each when it is first needed. The method `warm_up` compiles all before it returns.

    Attributes:
        client: the engine's client; `llm.core` is the engine itself.
        memory_budget: how the device's memory is divided.

    Raises:
        FileNotFoundError, CheckpointError, UnsupportedConfigError: the checkpoint cannot be used; the message says why.
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nnx.Module | tuple[ModelConfig, Any] | None = None,
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
        prefix_cache_tokens: int | None = None,
        prefix_cache_policy: str = "lru",
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self.client, self.memory_budget = build_client(
            model=model, tokenizer=tokenizer, skip_tokenizer_init=skip_tokenizer_init, dtype=dtype,
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size, kv_cache_tokens=kv_cache_tokens, gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching, speculative_config=speculative_config,
            diffusion_config=diffusion_config, branch_mode=branch_mode, scheduling_policy=scheduling_policy,
            tensor_parallel_size=tensor_parallel_size, attention_backend=attention_backend, seed=seed,
            strict_config=strict_config, ignore_config_fields=ignore_config_fields, warm_up=warm_up,
            prefix_cache_tokens=prefix_cache_tokens, prefix_cache_policy=prefix_cache_policy,
            logprobs_mode=logprobs_mode,
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

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; returns outputs in the order of the prompts.

        Args:
            prompts: str, list[int] or {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: for all prompts, or one for each; None: `default_sampling_params()`.
            use_tqdm: show a progress bar.
            priority: with `scheduling_policy="priority"`, for all prompts or one for each; the lowest runs first.

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
        *,
        priority: int | Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several: lists of {"role": ..., "content": ...} messages.

        Args:
            messages: one conversation, or a list of conversations.
            priority: as for `generate`.
            chat_template_kwargs: passed to the checkpoint's chat template, whether it reads them or not.
            template_arguments: passed to the checkpoint's chat template, which has to read them (`tools` and the like
                go to every template).

        Raises:
            ValueError: as for `generate`; or there is no chat template, or it refuses the messages; or a keyword is
                read by nothing.
        """
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages must be a conversation or a list of conversations, got {messages!r}")
        conversations = [messages] if is_conversation(messages) else list(messages)
        inputs = self.client.inputs
        arguments = inputs.template_arguments(chat_template_kwargs, template_arguments)
        prompts = [inputs.render(c, i, arguments) for i, c in enumerate(conversations)]
        requests = inputs.requests(prompts, sampling_params, stream=False, priority=priority)
        return self.client.run(requests, use_tqdm=use_tqdm)

    def stream(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Complete prompts and yield outputs as they land: the text and token ids since a request's previous output.

        Several prompts run at once; `request_id` tells which one an output is for (ids grow in the order of prompts).
        A conversation (a list of messages) is a prompt too. Leaving the loop early aborts unfinished requests.

        Raises:
            ValueError: as for `generate`; raised by the call itself.
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
        """Complete `prefix + suffix` for every suffix at once; `outputs[i]` continues `suffixes[i]`.

        The prefix is computed and stored once. Each branch gets the tokens that `generate` gives for its prompt alone.
        Where one set of parameters with a seed serves all branches, branch i has seed + i.

        Args:
            prefix: text, a list of token ids, or a dict with "prompt" or "prompt_token_ids".
            suffixes: one for each branch, text or token ids as the prefix is; a suffix may be empty.
            sampling_params: for all branches, or one for each.
            branch_mode: "in_one_sequence" or "batching"; None: the engine's.
            max_parallel_branches: most branches that run at once; None: all.
            predicted_lengths: expected number of tokens of each branch; the longest start first.

        Raises:
            ValueError: as for `generate`; or a suffix is not of the prefix's form.
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
        """Complete branches as `generate_branches` does; yields outputs of branch `outputs[0].index` as they land."""
        group = self.client.inputs.branches(
            prefix, suffixes, sampling_params, branch_mode=branch_mode, max_parallel=max_parallel_branches,
            predicted=predicted_lengths, stream=True,
        )  # fmt: skip
        self.core.check([group])
        return self.client.outputs([group], CompileNotice(), stream=True)

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Continue prompts by beam search; returns outputs in the order of the prompts.

        Beams share the pages of their common prefix: a beam that forks copies less than a page, and a dropped one
        frees its own pages.

        Args:
            prompts: as for `generate`.

        Raises:
            ValueError: a prompt cannot be served, or there are too many end-of-sequence tokens.
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
        """Answer a question with a plan whose points are decoded in parallel, as branches of one conversation.

        Args:
            question: the user's message.
            sampling_params: for the plan and every point (point i of a wave has seed + i); `max_tokens` limits each
                point. None: the checkpoint's defaults.
            branch_mode: "in_one_sequence" or "batching"; None: the engine's.
            protocol: "plan" ([PLAN] or [DIRECT], enforced by a grammar), "outline" (a numbered list, for any chat
                model), or "auto": "plan" where the tokenizer has its markers, else "outline".
            max_parallel_branches: most points that are decoded at once; None: all.
            skeleton: the text of a plan to expand, instead of asking the model for one.
            on_event: called with new text as it lands.

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
        """Queue one prompt for a caller that calls `step` itself; returns its request id.

        Args:
            prompt: as for `generate`, or a conversation.
            stream: `step` returns new text and tokens as they land, not one output at the end.
            arrival_time: time of arrival by `time.perf_counter`; None: now.
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
        """Run one step of the engine if there is work; returns new outputs of requests that `add_request` queued."""
        self.client.step()
        return self._outbox.take()

    def has_unfinished_requests(self) -> bool:
        """Whether any caller has an unfinished request."""
        return self.core.has_unfinished_requests()

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Return the given sampling parameters, with defaults from the checkpoint's `generation_config.json`."""
        return self.client.default_sampling_params(**given)

    def warm_up(self, use_tqdm: bool = True) -> None:
        """Compile every program that requests can need, with a progress line for each.

        Without it, a program is compiled when it is first needed. Either way it is kept on disk for the next process.
        """
        self.core.warm_up(progress=use_tqdm)

    def abort(self, request_id: str) -> bool:
        """Abort an unfinished request; returns False if there is none of that id."""
        return bool(self.client.abort(request_id))

    def abort_all(self) -> int:
        """Abort all unfinished requests, of every caller; returns how many there were."""
        return len(self.core.abort(*self.core.scheduler.requests))

    def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes; returns False if unfinished requests still use some, which stay."""
        return self.core.reset_prefix_cache()

    def draw_prefix_cache(self) -> str:
        """Draw the tree of cached prefixes with their text, or with token ids if there is no tokenizer."""
        return self.client.draw_prefix_cache()

    def get_metrics(self) -> EngineMetrics:
        """Return counters since the start and current gauges."""
        return self.core.get_metrics()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: this engine has none.
        """
        return self.client.get_tokenizer()
