"""From prompts and parameters as users write them to checked requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.request import Request
from jaxinfer.models.config import ModelConfig
from jaxinfer.prompts import TokenizedPrompt, check_prompt, is_conversation, tokenize_prompt
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer

_WORD = 2**32


class InputProcessor:
    """Makes requests for one engine, and counts them."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        generation_config: Mapping[str, Any],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.generation_config = generation_config
        self.tokenizer = tokenizer
        self._num_requests = 0

    def render(self, conversation: Any, index: int, template_arguments: Mapping[str, Any]) -> dict[str, Any]:
        if not is_conversation(conversation):
            raise ValueError(f"conversation {index} must be a list of {{'role', 'content'}} messages")
        if self.tokenizer is None:
            raise ValueError(f"conversation {index} is text, but this engine has no tokenizer")
        return {"prompt_token_ids": self.tokenizer.apply_chat_template(conversation, **template_arguments)}

    def requests(
        self, prompts: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None, *, stream: bool
    ) -> list[Request]:
        """Checked requests for all prompts; none is queued yet."""
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
            self._check_params(params[index], index)
            tokenized.append(tokens)
        return [self._request(tokens, p, stream) for tokens, p in zip(tokenized, params, strict=True)]

    def _check_params(self, params: SamplingParams, index: int) -> None:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params of prompt {index} must be SamplingParams, got {params!r}")
        if params.n > 1:
            raise ValueError(
                f"sampling_params of prompt {index}: n={params.n} is not supported yet; "
                f"pass the prompt {params.n} times"
            )
        if params.bad_words and self.tokenizer is None:
            raise ValueError(f"sampling_params of prompt {index}: bad_words={params.bad_words!r} needs a tokenizer")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"sampling_params of prompt {index}: stop={params.stop!r} needs a tokenizer")
        vocab = self.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= vocab:
                    raise ValueError(
                        f"sampling_params of prompt {index}: {name} has {token}, outside the vocabulary of {vocab}"
                    )

    def _request(self, prompt: TokenizedPrompt, params: SamplingParams, stream: bool) -> Request:
        number = self._num_requests
        self._num_requests += 1
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
        )  # fmt: skip

    def _bad_token_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the bad words: as a text begins with them, and as they follow a space."""
        if not params.bad_words or self.tokenizer is None:
            return ()
        texts = [text for word in params.bad_words for text in (word.lstrip(), " " + word.lstrip())]
        sequences = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: the generation config's, or else the model config's."""
        found = self.generation_config.get("eos_token_id")
        if found is None:
            return frozenset(self.model_config.eos_token_ids)
        return frozenset(found if isinstance(found, list) else [found])

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's `generation_config.json` below what is given here."""
        return SamplingParams.from_generation_config(self.generation_config, **given)
