"""`LLM`: the engine as users meet it."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.branch_methods import BranchMethods
from jaxinfer.checkpoint.directory import (
    embedded_checkpoint,
    find_checkpoint,
    read_config,
    read_generation_config,
)
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.compile_cache import enable_compile_cache
from jaxinfer.config import (
    EngineConfig,
    SpeculativeConfig,
    check_model_len,
    check_positive_integer,
    page_size_for,
    resolve_dtype,
)
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.arrivals import members_of
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.frontend.output_processor import Inbox, OutputProcessor
from jaxinfer.frontend.progress import CompileNotice, CompileWatcher, GenerationProgress
from jaxinfer.frontend.prompts import as_prompt_list, is_conversation
from jaxinfer.memory.budget import plan_memory
from jaxinfer.memory.share import set_jax_share
from jaxinfer.models.unknown_fields import ConfigOptions
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.skeleton.answer import knows_plans
from jaxinfer.strategies.choose import denoiser_of, diffusion_of, round_width
from jaxinfer.strategies.drafters import check_drafter, load_speculator, with_drafter
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DRAWN = 72  # characters of a node of the cache that are drawn


class LLM(BranchMethods):
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
        if warm_up not in ("background", False):
            raise ValueError(f'warm_up must be "background" or False, got {warm_up!r}')
        fields: ConfigOptions = {"strict_config": strict_config, "ignore_config_fields": ignore_config_fields}
        speculative = None if speculative_config is None else SpeculativeConfig.of(speculative_config)
        enable_compile_cache()
        set_jax_share(gpu_memory_utilization)  # before anything below starts JAX
        resolved = resolve_dtype(dtype)
        mesh = _make_mesh(tensor_parallel_size)
        for name, value in (
            ("max_model_len", max_model_len), ("page_size", page_size), ("kv_cache_tokens", kv_cache_tokens),
        ):  # fmt: skip
            if value is not None:
                check_positive_integer(name, value)
        directory = find_checkpoint(embedded_checkpoint() if model is None else model)
        _, config = read_config(directory, **fields)
        diffusion = diffusion_of(config, diffusion_config, speculative)
        if diffusion is not None:
            max_num_seqs = min(max_num_seqs, max(1, max_num_batched_tokens // round_width(diffusion, config)))
            enable_prefix_caching &= not config.is_bidirectional  # what a token is depends on those behind it
            page_size = page_size_for(config, None if page_size == EngineConfig.page_size else page_size)
            branch_mode = "batching"  # blocks of several branches do not share a row
        if max_model_len is None:
            max_model_len = config.max_position_embeddings
            if kv_cache_tokens is not None and kv_cache_tokens >= page_size:
                # Asking for a pool without a length means: the longest requests that the pool holds.
                max_model_len = min(max_model_len, kv_cache_tokens // page_size * page_size)
        else:
            check_model_len(config, max_model_len)
        engine_config = EngineConfig(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size, enable_prefix_caching=enable_prefix_caching, scheduling_policy=scheduling_policy,
            attention_backend=attention_backend, branch_mode=branch_mode, seed=seed,
            # Until memory is planned, room for one request.
            kv_cache_tokens=max_model_len + page_size if kv_cache_tokens is None else kv_cache_tokens,
        )  # fmt: skip
        # Small files first: what is wrong with them is said before the weights are loaded.
        self.generation_config = read_generation_config(directory)
        tokenizer_directory = Path(tokenizer) if tokenizer is not None else directory
        tokenizer_of_model = None
        if not skip_tokenizer_init and (tokenizer is not None or Tokenizer.exists(tokenizer_directory)):
            tokenizer_of_model = Tokenizer(tokenizer_directory)
        drafter = None
        if speculative is not None:
            speculative = with_drafter(speculative, directory)
            drafter = check_drafter(speculative, directory, config, max_model_len, **fields)
        config, module = load_checkpoint(directory, dtype=resolved, mesh=mesh, config=config)
        maker = None if diffusion is None else denoiser_of(diffusion, config)
        if speculative is not None:
            maker = load_speculator(speculative, config, drafter, dtype=resolved, mesh=mesh, **fields)
        self.memory_budget = plan_memory(
            module, engine_config, dtype=resolved, kv_cache_tokens=kv_cache_tokens,
            gpu_memory_utilization=gpu_memory_utilization, mesh=mesh, maker=maker,
        )  # fmt: skip
        logger.info("memory of each device:\n%s", self.memory_budget.table())
        engine_config = dataclasses.replace(engine_config, kv_cache_tokens=self.memory_budget.kv_tokens)
        self.model_config = config
        make = None if maker is None else maker.strategy(engine_config, module, dtype=resolved, mesh=mesh)
        strategy = {} if make is None else {"make_strategy": make}
        vocabulary = None
        if tokenizer_of_model is not None and knows_plans(tokenizer_of_model):
            vocabulary = Vocabulary.from_tokenizer(tokenizer_of_model, config.vocab_size)
        core = EngineCore(module, engine_config, dtype=resolved, mesh=mesh, vocabulary=vocabulary, **strategy)
        inputs = InputProcessor(engine_config, config, self.generation_config, tokenizer_of_model)
        super().__init__(core, inputs, OutputProcessor(core, tokenizer_of_model), tokenizer_of_model)
        self._outbox = self._processor.inbox()  # for callers of `step`
        if warm_up:
            core.warm_up_in_background()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs stand in the order of the prompts.

        Args:
            prompts: str, list[int] or {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: for all prompts, or one for each; None: `default_sampling_params()`.
            use_tqdm: show a progress bar.

        Raises:
            ValueError: a prompt or its parameters cannot be served; nothing has run then.
        """
        return self._run(self._inputs.requests(as_prompt_list(prompts), sampling_params, stream=False), use_tqdm)

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
        prompts = [self._inputs.render(c, i, template_arguments) for i, c in enumerate(conversations)]
        return self._run(self._inputs.requests(prompts, sampling_params, stream=False), use_tqdm)

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
        items = [self._inputs.render(p, i, {}) if is_conversation(p) else p for i, p in enumerate(items)]
        requests = self._inputs.requests(items, sampling_params, stream=True)
        self.core.check(requests)
        return self._steps(requests, CompileNotice(), stream=True)

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        arrival_time: float | None = None,
    ) -> str:
        """Queue one prompt for those who call `step` themselves; returns its request id.

        Args:
            prompt: as for `generate`, or a conversation.
            stream: `step` returns what is new as it comes, not the whole at the end.
            arrival_time: when the request came, by `time.perf_counter`; None: now.

        Raises:
            ValueError: as for `generate`; nothing is queued then.
        """
        if is_conversation(prompt):
            prompt = self._inputs.render(prompt, 0, {})
        [request] = self._inputs.requests([prompt], sampling_params, stream=stream)
        if arrival_time is not None:
            for sequence in request.members if isinstance(request, RequestGroup) else [request]:
                sequence.metrics.arrival_time = arrival_time
        self._add([request], self._outbox, stream=stream)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine, if there is work; what came of requests that `add_request` queued."""
        if self.core.has_unfinished_requests():
            self.core.step()
        return self._outbox.take()

    def has_unfinished_requests(self) -> bool:
        """Whether there is a request, of any caller, that has not come to its end."""
        return self.core.has_unfinished_requests()

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's `generation_config.json` below what is given here."""
        return self._inputs.default_sampling_params(**given)

    def warm_up(self, use_tqdm: bool = True) -> None:
        """Compile every program that requests can need, with a progress line that names it.

        Without it they are compiled when they are first needed. Either way they are kept on disk for the next process.
        """
        self.core.warm_up(progress=use_tqdm)

    def abort(self, request_id: str) -> bool:
        """End an unfinished request; False if there is none of that id."""
        return bool(self.core.abort(request_id))

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
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer")
        return self.tokenizer

    def _add(self, requests: Sequence[Request | RequestGroup], inbox: Inbox, *, stream: bool) -> None:
        """Queue requests, all of them or none."""
        for request in requests:
            if isinstance(request, RequestGroup):
                self._processor.follow_group(request, inbox, stream=stream)
            else:
                self._processor.follow(request, inbox, stream=stream)
        try:
            self.core.add(requests)
        except ValueError:
            self._processor.forget([member.request_id for request in requests for member in members_of(request)])
            raise

    def _run(self, requests: Sequence[Request | RequestGroup], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with GenerationProgress(len(requests), enabled=use_tqdm) as progress:
            for output in self._steps(requests, progress, stream=False):
                done[output.request_id] = output
                progress.update(output)
        return [done[request.request_id] for request in requests]

    def _steps(
        self, requests: Sequence[Request | RequestGroup], watcher: CompileWatcher, *, stream: bool
    ) -> Iterator[RequestOutput]:
        """Run until these requests are finished; whoever leaves early takes the unfinished ones along.

        Steps serve all requests of the engine: outputs of other callers' requests go to their inboxes.
        """
        inbox = self._processor.inbox()
        unfinished = {request.request_id for request in requests}
        listeners = self.core.compile_listeners
        listeners.append(watcher.compiling)
        try:
            self._add(requests, inbox, stream=stream)
            while unfinished:
                outputs = inbox.take()
                for output in outputs:
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
                if outputs:
                    continue  # more may have landed meanwhile, in steps of other callers
                if not self.core.has_unfinished_requests():
                    raise RuntimeError(f"the engine has nothing left to do, and has no end of {sorted(unfinished)}")
                self.core.step()
                watcher.compiled()
        finally:
            self.core.abort(*unfinished)
            listeners.remove(watcher.compiling)
            watcher.compiled()


def _make_mesh(size: int) -> Mesh | None:
    """A mesh of `size` devices over the axis "tensor"; None for one device."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"tensor_parallel_size must be an integer of at least 1, got {size!r}")
    devices = jax.devices()
    if size > len(devices):
        of_cpu = f"; with JAX_NUM_CPU_DEVICES={size} in the environment the CPU is as many"
        raise ValueError(
            f"tensor_parallel_size={size}, but there are {len(devices)} devices"
            + (of_cpu if devices[0].platform == "cpu" else "")
        )
    return None if size == 1 else Mesh(np.array(devices[:size]), ("tensor",))
