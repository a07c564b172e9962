"""Completions that were asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Self

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.chat_request import salt_of
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.protocol.completions import CompletionRequest, prompts_of
from jaxinfer.server.sampling import refuse_uncomputed, sampling_params
from jaxinfer.server.service import Service

_DEFAULT_MAX_TOKENS = 16
_MOST_IDS = 1 << 31
MOST_PROMPTS = 1024


@dataclass
class AskedCompletions:
    """Prompts that were checked.

    Attributes:
        params: of each completion.
        prompts: as `AsyncLLM.add` takes them.
        texts: those to give back before the completions; empty without `echo`.
    """

    service: Service
    body: CompletionRequest
    params: SamplingParams
    prompts: list[dict[str, Any]]
    texts: list[str]

    @classmethod
    async def read(cls, service: Service, body: CompletionRequest) -> Self:
        """Check a body, beside the event loop.

        Raises:
            ApiError: it cannot be served.
        """
        return await asyncio.to_thread(cls._read, service, body)

    @classmethod
    def _read(cls, service: Service, body: CompletionRequest) -> Self:
        llm = service.llm
        encode, decode = llm.get_tokenizer().encode, llm.get_tokenizer().decode
        service.check_model(body.model)
        refuse_uncomputed(body)
        if body.best_of is not None and body.best_of > (body.n or 1):
            raise ApiError(400, f"best_of={body.best_of} is not served: it must be at most n", "best_of")
        given = prompts_of(body)
        if not given or len(given) > MOST_PROMPTS:
            raise ApiError(400, f"prompt must be 1 to {MOST_PROMPTS} prompts, got {len(given)}", "prompt")
        most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if most == 0 and not body.echo:
            raise ApiError(400, "max_tokens must be at least 1, or 0 with echo", "max_tokens")
        own = {"max_tokens": max(1, most), "logprobs": body.logprobs}
        if body.echo and body.logprobs is not None:
            if body.prompt_logprobs not in (None, body.logprobs):
                raise ApiError(400, "with echo and logprobs, prompt_logprobs must be as many", "prompt_logprobs")
            own["prompt_logprobs"] = body.logprobs
        try:
            params = sampling_params(body, llm.default_sampling_params, llm.config.max_num_seqs, **own)
            tokens = [
                encode(one, add_special_tokens=body.add_special_tokens is not False) if isinstance(one, str) else one
                for one in given
            ]
        except ValueError as error:
            raise of_value_error(error) from error
        for number, prompt in enumerate(tokens):
            if (wrong := next((token for token in prompt if not 0 <= token < _MOST_IDS), None)) is not None:
                raise ApiError(400, f"prompt {number} has token id {wrong}, outside the vocabulary", "prompt")
            service.check_length(len(prompt) + max(1, most), "max_tokens" if len(prompt) < most else "prompt")
        salt = salt_of(body)
        prompts = [
            {"prompt_token_ids": ids, **salt, **({"prompt": one} if isinstance(one, str) else {})}
            for ids, one in zip(tokens, given, strict=True)
        ]
        texts = [(one if isinstance(one, str) else decode(one)) if body.echo else "" for one in given]
        return cls(service, body, params, prompts, texts)
