"""`JaxinferRollout`: this engine as the rollout engine of tunix's trainers."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.checkpoint.incoming import assembled_model
from jaxinfer.integrations.tunix_weights import check_no_lora, config_of, dtype_of, named_tensors
from jaxinfer.llm import LLM
from jaxinfer.outputs import CompletionOutput
from jaxinfer.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_base: Any = importlib.import_module("tunix.rl.rollout.base_rollout")
_HONOURED = frozenset({
    "max_tokens_to_generate", "temperature", "top_p", "top_k", "seed", "max_prompt_length", "data_type", "eos_tokens",
    "tensor_parallel_size", "return_logprobs",
})  # fmt: skip
_OF_OTHER_ENGINES = ("rollout_vllm_", "rollout_sglang_jax_", "kv_cache_size")


class TunixTokenizer(Protocol):
    """tunix's `TokenizerAdapter`, as far as it is used here."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def bos_id(self) -> int | None: ...

    def eos_id(self) -> int: ...

    def pad_id(self) -> int: ...

    def dedup_bos_ids(self, ids: list[int]) -> list[int]: ...


class JaxinferRollout(_base.BaseRollout):
    """Rollouts of tunix's Llama, Qwen2 and Qwen3 models with this engine.

    Give the class to `ClusterConfig(rollout_engine=...)`, with options of `LLM` by
    `functools.partial(JaxinferRollout, max_num_seqs=64, ...)`.

    Equal prompts of a call are samples of one prompt, whose prefix is computed and stored once. A completion depends on
    the weights, the prompt, the rollout's seed, the number of the call and its place in it, on nothing else. Calls from
    several threads run one after the other, in the order in which they come. Completions end with the token that ends
    them, so that a trainer can learn to end; tunix's own engine leaves it out.

    The engine has a thread of its own, where neither the mesh nor the transfer guard of the trainer's thread holds:
    with a mesh that comes and goes, every program would be compiled again.

    Args:
        rollout_actor: the model; its weights are copied.
        tokenizer: tunix's adapter of the tokenizer.
        mesh: the devices of rollouts; the model is split over `tensor_parallel_size` of them, or over all.
        rollout_config: of rollouts while training. It bounds the length of sequences, unless `max_model_len` is given.
        engine: options of `LLM`.

    Raises:
        ValueError: the model is of another kind or has LoRA parameters, or a field of the configuration is not
            supported.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: TunixTokenizer,
        mesh: jax.sharding.Mesh,
        rollout_config: Any,
        **engine: Any,
    ) -> None:
        _check_config(rollout_config)
        _log_ignored(rollout_config)
        self._tokenizer, self._calls = tokenizer, itertools.count()
        self._temperature = rollout_config.temperature  # the trainer's own, whatever is used to evaluate
        self._thread = ThreadPoolExecutor(1, "jaxinfer-rollout")
        state = nnx.state(rollout_actor, nnx.Param)
        check_no_lora(state)
        longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        options = {
            "max_model_len": longest, "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True,
            "tensor_parallel_size": _num_devices(rollout_config.tensor_parallel_size, mesh),
            "dtype": str(jnp.dtype(rollout_config.data_type or dtype_of(rollout_actor, state))), **engine,
        }  # fmt: skip
        config = config_of(rollout_actor, options["max_model_len"])

        def build() -> LLM:
            with jax.default_device(mesh.devices.flat[0]):
                arrays = dict(assembled_model(named_tensors(state), config, jnp.dtype(options["dtype"])))
            llm = LLM(model=(config, arrays), **options)
            llm.core.weights.of("target").own()
            return llm

        self.llm: LLM = self._in_thread(build)

    def _in_thread[T](self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def generate(self, prompts: str | Sequence[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Return a `RolloutOutput`: a completion of each prompt, and the prompts padded to `max_prompt_length`.

        `logprobs` are those of the distribution that tokens were drawn from, after temperature, top-p and top-k.

        Raises:
            ValueError: a field of the configuration is not supported, or a prompt is longer than it says.
            TypeError: there are other arguments.
            RuntimeError: a request has failed.
        """
        if kwargs:
            raise TypeError(f"JaxinferRollout.generate has no arguments {', '.join(kwargs)}")
        _check_config(rollout_config)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        width, pad = rollout_config.max_prompt_length, self.pad_id()
        longest, most = width + rollout_config.max_tokens_to_generate, self.llm.client.inputs.config.max_model_len
        if longest > most:
            raise ValueError(
                f"max_prompt_length + max_tokens_to_generate = {longest} is more than the engine's "
                f"max_model_len={most}: give functools.partial(JaxinferRollout, max_model_len=...)"
            )
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(prompt, []).append(place)
        token_ids = [self._encoded(prompt) for prompt in places]
        for tokens, own in zip(token_ids, places.values(), strict=True):
            if len(tokens) > width:
                raise ValueError(f"prompt {own[0]} has {len(tokens)} tokens, more than max_prompt_length={width}")
        seed, call = _seed_words(rollout_config.seed), next(self._calls)
        params = [self._params(rollout_config, len(own), [*seed, call, own[0]]) for own in places.values()]
        outputs = self._in_thread(lambda: self.llm.generate(token_ids, params, use_tqdm=False))
        completions: list[Any] = [None] * len(prompts)
        padded = np.full((len(prompts), width), pad, np.int32)
        for output, own in zip(outputs, places.values(), strict=True):
            if output.error is not None:
                raise RuntimeError(f"the rollout of prompt {own[0]} has failed: {output.error}")
            for place, completion in zip(own, output.outputs, strict=True):
                completions[place] = completion
                padded[place, width - len(output.prompt_token_ids) :] = output.prompt_token_ids
        return _base.RolloutOutput(
            text=[self._tokenizer.decode(completion.token_ids) for completion in completions],
            logits=None,
            tokens=[np.asarray(completion.token_ids, np.int32) for completion in completions],
            left_padded_prompt_tokens=padded,
            logprobs=[_logprobs(completion) for completion in completions] if rollout_config.return_logprobs else None,
        )

    def _encoded(self, prompt: str) -> list[int]:
        """Return a prompt's tokens as tunix's own sampler has them: with one token of beginning, if there is one."""
        bos = self._tokenizer.bos_id()
        tokens = list(self._tokenizer.encode(prompt))
        return tokens if not bos else [int(token) for token in self._tokenizer.dedup_bos_ids([bos, *tokens])]

    def _params(self, config: Any, count: int, entropy: list[int]) -> SamplingParams:
        low, high = np.random.SeedSequence(entropy).generate_state(2)
        return SamplingParams(
            n=count, max_tokens=config.max_tokens_to_generate, temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None or config.top_k < 0 else config.top_k,
            seed=int(high) << 32 | int(low), stop_token_ids=list(config.eos_tokens or [self.eos_id()]),
            ignore_eos=True, logprobs=0 if config.return_logprobs else None, detokenize=False,
        )  # fmt: skip

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Return log probabilities float32 [B, C] of completions at the trainer's temperature; 0 at padding.

        Args:
            prompt_tokens: int32 [B, P], padded on the left.
            completion_tokens: int32 [B, C], padded on the right. Where the padding is the token that ends sequences,
                the first one of it belongs to the completion.
        """
        pad, ends = self.pad_id(), self.pad_id() == self.eos_id()
        temperature = self._temperature if self._temperature > 0 else 1.0

        def score() -> np.ndarray[Any, Any]:
            prompts = [_without_left(row, pad) for row in np.asarray(prompt_tokens)]
            completions = [_without_right(row, pad, keeps_one=ends) for row in np.asarray(completion_tokens)]
            return self.llm.score(prompts, completions, temperature, use_tqdm=False)

        found = self._in_thread(score)
        return jnp.asarray(np.pad(found, ((0, 0), (0, completion_tokens.shape[1] - found.shape[1]))))

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replace the engine's weights by the trainer's, which stay as they are.

        Raises:
            ValueError: they are not those of the model, or LoRA parameters are among them.
        """
        check_no_lora(params)
        self._in_thread(lambda: self.llm.update_weights(named_tensors(params)))

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Return None: a trainer that gets a module from here takes its weights for shared, and sends no new ones."""
        return None


def _check_config(config: Any) -> None:
    """Raise ValueError, naming the field, for what a `RolloutConfig` asks for that this engine does not do."""
    for name, value, default in _changed(config):
        is_one = name == "data_parallel_size" and value == 1
        if name not in _HONOURED and not name.startswith(_OF_OTHER_ENGINES) and not is_one:
            raise ValueError(f"{name}={value!r} is not supported by JaxinferRollout; allowed is {default!r}")


def _log_ignored(config: Any) -> None:
    ignored = [name for name, _, _ in _changed(config) if name.startswith(_OF_OTHER_ENGINES)]
    if ignored:
        logger.info("ignored, for they are of other rollout engines: %s", ", ".join(ignored))


def _changed(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields that are not as by default: name, value and default."""
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value is not default and value != default:
            yield field.name, value, default


def _num_devices(wanted: int, mesh: jax.sharding.Mesh) -> int:
    """Return over how many devices the model is split.

    Raises:
        ValueError: they are not the mesh's first ones, and JAX's.
    """
    count = mesh.size if wanted == -1 else wanted
    devices = list(mesh.devices.flat)[:count]
    if len(devices) != count or devices != jax.devices()[:count]:
        raise ValueError(
            f"tensor_parallel_size={wanted} on a mesh of {mesh.size} devices: the engine takes JAX's first {count} "
            "devices, which must be the mesh's first ones"
        )
    return count


def _seed_words(seed: Any) -> list[int]:
    """Return a rollout's seed, an integer or a JAX key, as integers."""
    if seed is None:
        return [0]
    if isinstance(seed, jax.Array):
        data = jax.random.key_data(seed) if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
        return [int(word) for word in np.asarray(data).reshape(-1)]
    return [int(seed) % 2**64]


def _logprobs(completion: CompletionOutput) -> np.ndarray[Any, Any]:
    assert completion.logprobs is not None
    return np.asarray([next(iter(entry.values())).logprob for entry in completion.logprobs], np.float32)


def _without_left(row: np.ndarray[Any, Any], pad: int) -> list[int]:
    """Return a prompt without the padding before it; by place, as a prompt may hold the padding's token."""
    first = int(np.argmax(row != pad)) if (row != pad).any() else len(row) - 1
    return row[first:].tolist()


def _without_right(row: np.ndarray[Any, Any], pad: int, *, keeps_one: bool) -> list[int]:
    """Return a completion without the padding after it, but for one token of it if that ends the sequence."""
    is_token = row != pad
    length = len(row) - int(np.argmax(is_token[::-1])) if is_token.any() else 0
    return row[: min(len(row), length + keeps_one)].tolist()
