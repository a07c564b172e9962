"""Input processing: checked requests from prompts and parameters as users write them."""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.constraints.automaton import ConstraintError, TokenAutomaton
from jaxinfer.constraints.guidance import Guidance
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.constraints.workers import Workers
from jaxinfer.field_checks import check_positive_integer
from jaxinfer.frontend.prompts import TokenizedPrompt, check_prompt, is_conversation, joined_prompts, tokenize_prompt
from jaxinfer.limits import BRANCH_MODES
from jaxinfer.models.config import ModelConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.tokenizer import Tokenizer

_WORD = 2**32
_MOST_BAD_WORDS = 32  # lists of them that are kept in tokens
# What transformers gives every template, or takes itself.
_OF_ALL_TEMPLATES = frozenset({
    "add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template", "truncation",
    "max_length",
})  # fmt: skip


class InputProcessor:
    """Maker of one engine's requests, which it numbers. Any thread may call its methods.

    Args:
        workers: threads that compile grammars; None: the calling thread does.
        edit_threshold: of the diffusion model's configuration; None: committed tokens are not edited.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        generation_config: Mapping[str, Any],
        tokenizer: Tokenizer | None,
        workers: Workers | None = None,
        edit_threshold: float | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.generation_config = generation_config
        mask = model_config.mask_token_id
        # In a prompt, the mask token's string is plain text.
        self.tokenizer = tokenizer if tokenizer is None or mask is None else tokenizer.without(mask)
        self._numbers = itertools.count()
        self._workers, self._edit_threshold = workers, edit_threshold
        # For each prompt and sample of a request the same words are asked for.
        self._bad_words_in_tokens = functools.lru_cache(_MOST_BAD_WORDS)(functools.partial(_in_tokens, self.tokenizer))
        self._guidance: Guidance | None = None
        if tokenizer is not None and self.eos_token_ids:
            self._guidance = Guidance.of(tokenizer, model_config.vocab_size, self.eos_token_ids)

    def render(self, conversation: Any, index: int, template_arguments: Mapping[str, Any]) -> dict[str, Any]:
        if not is_conversation(conversation):
            raise ValueError(f"conversation {index} must be a list of {{'role', 'content'}} messages")
        if self.tokenizer is None:
            raise ValueError(
                f"conversation {index} is text, but this engine has no tokenizer: give tokenizer=..., or token ids to "
                "`generate`"
            )
        return {"prompt_token_ids": self.tokenizer.apply_chat_template(conversation, **template_arguments)}

    def template_arguments(self, of_template: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the chat template from `chat_template_kwargs` and further keywords.

        Raises:
            ValueError: nothing reads a keyword.
        """
        template = given.get("chat_template") or (self.tokenizer.hf.chat_template if self.tokenizer else None)
        for name in given:
            if name not in _OF_ALL_TEMPLATES and name not in str(template):
                raise ValueError(
                    f"{name} is no argument of `chat`, and the chat template does not read it; chat_template_kwargs "
                    "takes names that some templates read"
                )
        return {**(of_template or {}), **given}

    def requests(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        stream: bool,
        priority: int | Sequence[int] | None = None,
    ) -> list[Request | RequestGroup]:
        """Make checked requests for all prompts, a group for each with several samples; none is queued yet.

        Args:
            priority: for all of them, or one for each; the lowest runs first. None: they run in the order of arrival.

        Raises:
            ValueError: a prompt, its parameters or its priority cannot be served.
        """
        priorities = self._priorities(0 if priority is None else priority, len(prompts))
        found = [
            self._request(tokens, params, stream) if params.n == 1 else self._samples(tokens, params, stream)
            for tokens, params in self._checked(prompts, sampling_params)
        ]
        for item, number in zip(found, priorities, strict=True):
            for sequence in [*item.members, item.trunk] if isinstance(item, RequestGroup) else [item]:
                if sequence is not None:
                    sequence.priority = number
        return found

    def _priorities(self, priority: int | Sequence[int], count: int) -> list[int]:
        found: Any = [priority] * count if _is_integer(priority) else priority
        if isinstance(found, str) or not isinstance(found, Sequence):
            raise ValueError(f"priority must be an integer or a list of integers, got {priority!r}")
        if len(found) != count:
            raise ValueError(f"{len(found)} priorities for {count} prompts")
        for index, number in enumerate(found):
            if not _is_integer(number):
                raise ValueError(f"priority of prompt {index} must be an integer, got {number!r}")
        if any(found) and self.config.scheduling_policy != "priority":
            raise ValueError(
                f'priority={priority!r} needs an engine with scheduling_policy="priority", this one has '
                f'"{self.config.scheduling_policy}"'
            )
        return [int(number) for number in found]

    def tokenized(self, prompts: Sequence[Any]) -> list[tuple[str, TokenizedPrompt]]:
        """Tokenise and check prompts; returns each with a new request id."""
        checked = [tokens for tokens, _ in self._checked(list(prompts), SamplingParams())]
        return [(str(self._take_number()), tokens) for tokens in checked]

    def branches(
        self,
        prefix: Any,
        suffixes: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        branch_mode: str | None,
        max_parallel: int | None = None,
        predicted: Sequence[int] | None = None,
        stream: bool,
    ) -> RequestGroup:
        """Make a group of branches, one for `prefix` with each of `suffixes`; nothing is queued yet.

        Raises:
            ValueError: a suffix is not of the prefix's form, or one of the prompts or parameters cannot be served.
        """
        if branch_mode is not None and branch_mode not in BRANCH_MODES:
            raise ValueError(f"branch_mode must be one of {', '.join(BRANCH_MODES)}, got {branch_mode!r}")
        if max_parallel is not None:
            check_positive_integer("max_parallel_branches", max_parallel)
        prompts = joined_prompts(prefix, suffixes)
        one_for_all = sampling_params is None or isinstance(sampling_params, SamplingParams)
        checked = self._checked(prompts, sampling_params)
        for index, (_, params) in enumerate(checked):
            if params.n != 1:
                raise ValueError(f"sampling_params of branch {index}: n={params.n}, a branch is one sequence")
            if params.prompt_logprobs is not None:
                raise ValueError(
                    f"sampling_params of branch {index}: prompt_logprobs={params.prompt_logprobs}, but each branch has "
                    "a prompt of its own: use `generate`"
                )
        if predicted is not None:
            lengths = list(predicted)
            if len(lengths) != len(prompts) or not all(_is_integer(length) for length in lengths):
                raise ValueError(f"predicted_lengths must be {len(prompts)} integers, got {predicted!r}")
        if self.model_config.mask_token_id is not None:
            branch_mode = "batching"  # sequences in one row would have their blocks at one place
        number = self._take_number()
        members = [
            self._member(number, index, tokens, _with_seed(params, index if one_for_all else 0), stream)
            for index, (tokens, params) in enumerate(checked)
        ]
        start = tokenize_prompt(prefix, 0, self.tokenizer)
        return RequestGroup(
            str(number), start.text, start.token_ids, members, page_size=self.config.page_size,
            branch_mode=branch_mode or self.config.branch_mode, predicted=predicted,
            max_parallel=self.config.max_parallel_branches if max_parallel is None else max_parallel,
        )  # fmt: skip

    def _samples(self, tokens: TokenizedPrompt, params: SamplingParams, stream: bool) -> RequestGroup:
        """Make a group of `params.n` samples; sample i has the seed `params.seed` + i."""
        number = self._take_number()
        silent = replace(params, n=1, prompt_logprobs=None)
        members = [
            self._member(number, index, tokens, _with_seed(own, index), stream)
            for index, own in enumerate([replace(params, n=1), *[silent] * (params.n - 1)])
        ]
        return RequestGroup(
            str(number), tokens.text, tokens.token_ids, members, page_size=self.config.page_size,
            branch_mode=self.config.branch_mode,
        )  # fmt: skip

    def _member(
        self, number: int, index: int, tokens: TokenizedPrompt, params: SamplingParams, stream: bool
    ) -> Request:
        request = self._request(tokens, params, stream)
        request.request_id = f"{number}-{index}"
        return request

    def _checked(
        self, prompts: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[TokenizedPrompt, SamplingParams]]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.default_sampling_params()] * len(prompts)
        else:
            if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
                raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}")
            params = list(sampling_params)
            if len(params) != len(prompts):
                raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts")
        tokenized = []
        for index, prompt in enumerate(prompts):
            tokens = tokenize_prompt(prompt, index, self.tokenizer)
            check_prompt(
                tokens, index, vocab_size=self.model_config.vocab_size, max_model_len=self.config.max_model_len
            )
            mask = self.model_config.mask_token_id
            if mask is not None and mask in tokens.token_ids:
                raise ValueError(f"prompt {index} has the mask token ({mask}), which stands for what is not there yet")
            self.check_params(params[index], index)
            if params[index].top_k >= self.model_config.vocab_size:
                params[index] = replace(params[index], top_k=0)
            tokenized.append(tokens)
        return list(zip(tokenized, params, strict=True))

    def check_params(self, params: SamplingParams, index: int) -> None:
        """Raise ValueError, naming the prompt's index, if its parameters cannot be served. Grammars are compiled, and
        the words of `bad_words` tokenised: both are kept."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params of prompt {index} must be SamplingParams, got {params!r}")
        if params.bad_words and self.tokenizer is None:
            raise ValueError(f"sampling_params of prompt {index}: bad_words={params.bad_words!r} needs a tokenizer")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"sampling_params of prompt {index}: stop={params.stop!r} needs a tokenizer")
        if self.model_config.mask_token_id is not None:
            _check_of_blocks(params, index)
        vocab = self.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= vocab:
                    raise ValueError(
                        f"sampling_params of prompt {index}: {name} has {token}, outside the vocabulary of {vocab}"
                    )
        self._check_something_is_left(params, index)
        try:
            self.grammar_of(params.structured_outputs)
        except (ValueError, ConstraintError) as error:
            raise ValueError(f"sampling_params of prompt {index}: {error}") from error

    def grammar_of(self, wanted: StructuredOutputsParams | dict[str, Any] | None) -> TokenAutomaton[Any] | None:
        """Return the automaton of structured output; None: none is wanted. Compiled ones are kept.

        Raises:
            ValueError: the grammar is refused, or the engine cannot follow any.
            ConstraintError: it takes too long to compile.
        """
        if wanted is None:
            return None
        wanted = StructuredOutputsParams.of(wanted)
        if self._guidance is None:
            missing = "a tokenizer" if self.tokenizer is None else "end-of-sequence tokens"
            raise ValueError(f"structured_outputs needs {missing}, and this engine has none")
        if self.model_config.mask_token_id is not None:
            self._check_constrained_blocks()
        compiler = self._guidance
        found = compiler.known(wanted)  # without a wait for what else the threads have to do
        if found is not None or self._workers is None:
            return found or compiler.compile(wanted)
        try:
            return self._workers.run(lambda: compiler.compile(wanted))
        except ConstraintError as error:
            compiler.give_up(wanted, str(error))
            raise

    def _check_constrained_blocks(self) -> None:
        """Raise ValueError, naming the field, where a diffusion model cannot follow a grammar."""
        if self.model_config.is_bidirectional:
            raise ValueError(
                f"structured_outputs is not for {self.model_config.architecture}, a bidirectional diffusion model: a "
                "grammar judges tokens from left to right, and these change with what comes after them; allowed are "
                "block-diffusion models"
            )
        if self._edit_threshold is not None:
            raise ValueError(
                f"structured_outputs needs edit_threshold=None in diffusion_config, got {self._edit_threshold}: edits "
                "replace tokens that the grammar has allowed"
            )

    def _check_something_is_left(self, params: SamplingParams, index: int) -> None:
        """Raise ValueError, naming the fields, if the parameters leave no token that can be sampled first."""
        vocab, allowed = self.model_config.vocab_size, params.allowed_token_ids
        bad = {sequence[0] for sequence in self._bad_token_ids(params) if len(sequence) == 1}
        ending = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self.eos_token_ids)
        ending = ending if params.min_tokens else set()
        if allowed is None and len(bad) + len(ending) < vocab:
            return
        left = set(range(vocab) if allowed is None else allowed)
        if left - bad - ending:
            return
        barring = {"allowed_token_ids": allowed is not None, "min_tokens": left & ending, "bad_words": left & bad}
        fields = [f"{name}={getattr(params, name)!r}" for name, bars in barring.items() if bars]
        raise ValueError(
            f"sampling_params of prompt {index}: {' and '.join(fields)} leave no token to sample (before min_tokens "
            "no token may end the sequence)"
        )

    def _request(self, prompt: TokenizedPrompt, params: SamplingParams, stream: bool) -> Request:
        number = self._take_number()
        limit = self.config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt.token_ids) + params.max_tokens)
        if params.seed is not None:
            key = divmod(params.seed % 2**64, _WORD)
        else:
            words = np.random.SeedSequence([self.config.seed % 2**64, number]).generate_state(2)
            key = (int(words[0]), int(words[1]))
        return Request(
            request_id=str(number), prompt_token_ids=prompt.token_ids, sampling_params=params,
            max_total_tokens=limit, eos_token_ids=self.eos_token_ids, prompt=prompt.text, request_key=key,
            stream=stream, bad_token_ids=self._bad_token_ids(params), cache_key=prompt.cache_salt,
            constraint=self.grammar_of(params.structured_outputs),
        )  # fmt: skip

    def _take_number(self) -> int:
        return next(self._numbers)

    def _bad_token_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of the bad words, each at the start of a text and after a space."""
        return self._bad_words_in_tokens(tuple(params.bad_words)) if params.bad_words else ()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: the generation config's, or else the model config's."""
        found = self.generation_config.get("eos_token_id")
        if found is None:
            return frozenset(self.model_config.eos_token_ids)
        return frozenset(found if isinstance(found, list) else [found])

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Return the given sampling parameters, with defaults from the checkpoint's `generation_config.json`."""
        return SamplingParams.from_generation_config(self.generation_config, **given)


def _in_tokens(tokenizer: Tokenizer | None, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    assert tokenizer is not None  # bad words are refused without one
    texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
    sequences = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


def _check_of_blocks(params: SamplingParams, index: int) -> None:
    """Raise ValueError, naming the field, for parameters that need token-by-token decoding: diffusion has none."""
    nothing = SamplingParams()
    if params.structured_outputs is not None and params.logprobs is not None:
        raise ValueError(
            f"sampling_params of prompt {index}: logprobs={params.logprobs} is not for structured_outputs of a "
            "diffusion model, got both: forced tokens are not drawn, and have no log probabilities; allowed is None"
        )
    for name in (
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
        "min_tokens", "prompt_logprobs",
    ):  # fmt: skip
        if getattr(params, name) != getattr(nothing, name):
            raise ValueError(
                f"sampling_params of prompt {index}: {name}={getattr(params, name)!r} is not for diffusion models, "
                "which make blocks of tokens at once"
            )


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=(params.seed + index) % _WORD**2)


def checked_priority(priority: Any) -> int:
    """Return the priority of one request.

    Raises:
        ValueError: it is no integer.
    """
    if not _is_integer(priority):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    return int(priority)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
