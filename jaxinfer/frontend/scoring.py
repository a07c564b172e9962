"""Method of `LLM` that gives log probabilities of given tokens."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.frontend.client import EngineClient
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.frontend.prompts import as_prompt_list, tokenize_prompt
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scoring import Scoring

# What follows the scored tokens is drawn and dropped.
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


class ScoringMethods:
    """What a caller asks a client's model about tokens that are there already."""

    client: EngineClient

    def score(
        self, prompts: Any, completions: Any, temperature: float = 1.0, *, use_tqdm: bool = True
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return log probabilities of given tokens: of each completion after its prompt.

        They are the target model's, in nats, as `logprobs` are of drawn tokens. All tokens of the completions are
        computed, and at most all of a prompt but its last token comes from the prefix cache. A sequence that has grown
        beyond a model's first range of longrope is scored as if all of it had been computed after that.

        Args:
            prompts: as for `generate`.
            completions: one for each prompt: a list or an array of token ids, or text, which is tokenised alone and
                without special tokens. It may be empty.
            temperature: what the model's logits are divided by.
            use_tqdm: show a progress bar.

        Returns:
            float32 [prompts, longest completion]; 0 after the end of a completion.

        Raises:
            ValueError: as for `generate`; or there is not one completion for each prompt; or the model is a diffusion
                model, which gives tokens no probability from left to right.
            RuntimeError: a request has failed, or generation is paused.
        """
        client = self.client
        requests = scoring_requests(client.inputs, prompts, completions, temperature)
        asked = [request for request in requests if request.scoring is not None]
        for output in client.run(asked, use_tqdm=use_tqdm):
            if output.error is not None:
                raise RuntimeError(f"a completion was not scored: {output.error}")
        found = [[] if request.scoring is None else request.scoring.logprobs for request in requests]
        scores = np.zeros((len(found), max(map(len, found), default=0)), np.float32)
        for row, logprobs in zip(scores, found, strict=True):
            row[: len(logprobs)] = logprobs
        return scores


def scoring_requests(inputs: InputProcessor, prompts: Any, completions: Any, temperature: float) -> list[Request]:
    """Make a request for each completion; none is queued. One for an empty completion has nothing to score.

    Raises:
        ValueError: as `LLM.score` says.
    """
    config = inputs.model_config
    if config.mask_token_id is not None:
        raise ValueError(
            f"score is not for {config.architecture}, a diffusion model: the probability of a token there depends on "
            "which of the others are known, and in which round"
        )
    is_number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not is_number or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a number above 0, got {temperature!r}")
    starts = [tokenize_prompt(prompt, i, inputs.tokenizer) for i, prompt in enumerate(as_prompt_list(prompts))]
    ends = _completions(completions, inputs)
    if len(starts) != len(ends):
        raise ValueError(f"{len(ends)} completions for {len(starts)} prompts")
    wholes = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not start.token_ids:
            raise ValueError(f"prompt {index} is empty: it needs at least 1 token")
        wrong = [token for token in end if not 0 <= token < config.vocab_size]
        if wrong:
            raise ValueError(
                f"completion {index} has token id {wrong[0]}, outside the vocabulary of {config.vocab_size}"
            )
        if len(start.token_ids) + len(end) > inputs.config.max_model_len:
            raise ValueError(
                f"prompt {index} and its completion have {len(start.token_ids) + len(end)} tokens, more than "
                f"max_model_len={inputs.config.max_model_len}"
            )
        whole: dict[str, Any] = {"prompt_token_ids": [*start.token_ids, *end[:-1]]}
        wholes.append(whole if start.cache_salt is None else {**whole, "cache_salt": start.cache_salt})
    requests = inputs.requests(wholes, _PARAMS, stream=False)
    found = [request for request in requests if isinstance(request, Request)]
    for request, end in zip(found, ends, strict=True):
        if end:
            request.scoring = Scoring(len(end), end[-1], float(temperature))
    return found


def _completions(completions: Any, inputs: InputProcessor) -> list[list[int]]:
    """Return the token ids of completions, one after the other."""
    items: Sequence[Any] = as_prompt_list(completions)
    found = []
    for index, item in enumerate(items):
        if isinstance(item, str) and inputs.tokenizer is not None:
            found.append(inputs.tokenizer.encode(item, add_special_tokens=False))
            continue
        try:
            found.append(tokenize_prompt(item, index, inputs.tokenizer).token_ids)
        except ValueError as error:
            raise ValueError(f"completion {index}: {error}") from error
    return found
