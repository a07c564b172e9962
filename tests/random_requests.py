"""Requests with random mixtures of all sampling parameters and options."""

from __future__ import annotations

import numpy as np

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request

VOCAB = 101


def random_request(rng: np.random.Generator, number: int) -> Request:
    """Any mixture of everything that a request can ask for."""

    def sometimes(value, otherwise):
        return value if rng.random() < 0.15 else otherwise

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    max_tokens = int(rng.integers(1, 12))
    params = SamplingParams(
        temperature=sometimes(0.0, float(rng.uniform(0.2, 2))),
        top_p=sometimes(float(rng.uniform(0.1, 1)), 1.0),
        top_k=sometimes(int(rng.integers(1, VOCAB)), 0),
        min_p=sometimes(float(rng.uniform(0, 0.5)), 0.0),
        seed=sometimes(number, None),
        presence_penalty=sometimes(1.0, 0.0),
        frequency_penalty=sometimes(0.5, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        logit_bias=sometimes(dict.fromkeys(tokens(5), 3.0), None),
        allowed_token_ids=sometimes(tokens(30), None),
        stop_token_ids=sometimes(tokens(3), None),
        ignore_eos=sometimes(True, False),
        min_tokens=sometimes(int(rng.integers(0, max_tokens + 1)), 0),
        max_tokens=max_tokens,
        logprobs=sometimes(int(rng.integers(0, 21)), None),
        prompt_logprobs=sometimes(int(rng.integers(0, 21)), None),
    )
    prompt = tokens(int(rng.integers(1, 80)))
    return Request(
        str(number), prompt, params, len(prompt) + max_tokens, eos_token_ids=frozenset((7,)),
        request_key=(number, 1), bad_token_ids=sometimes(((3,), (4, 5)), ()), stream=sometimes(True, False),
    )  # fmt: skip
