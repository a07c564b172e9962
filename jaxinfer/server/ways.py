"""Ways in which a request runs: as it is, in branches, or by beam search."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.branching.beam_search import BeamSearchParams
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError
from jaxinfer.server.protocol.common import Sampling
from jaxinfer.server.running import SearchSource, Source
from jaxinfer.server.service import Service

# What a search does not take: it follows the most likely tokens, and says nothing of them.
_NOT_OF_BEAMS = (
    "logprobs", "prompt_logprobs", "stop_strings", "stop_token_ids", "min_tokens", "logit_bias", "allowed_token_ids",
    "bad_words", "return_token_sources", "return_blocks",
)  # fmt: skip
# Nothing is drawn in a search, so that temperature, top_k, top_p, min_p and seed have no effect; penalties would have.
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Way:
    """How the prompts of one request run.

    Args:
        params: for each sequence.
        names: of the request, for aborts.

    Raises:
        ApiError: the body asks for what does not go together.
    """

    def __init__(self, service: Service, body: Sampling, params: SamplingParams, names: Sequence[str]) -> None:
        self._service, self._body, self.names = service, body, names
        self._kind = "delta" if body.stream else "final"
        self._suffixes: list[list[int]] = []
        if body.branches and (body.use_beam_search or params.n > 1):
            raise ApiError(400, "branches go without n and use_beam_search", "branches")
        if body.branches and (_echoes(body) or params.prompt_logprobs is not None):
            field = "echo" if _echoes(body) else "prompt_logprobs"
            raise ApiError(400, f"{field} goes without branches: each has a prompt of its own", field)
        if (body.branches or body.use_beam_search) and body.priority:
            raise ApiError(400, "priority goes without branches and use_beam_search", "priority")
        if body.branches and getattr(body, "add_special_tokens", None) is False:
            raise ApiError(400, "branches go with add_special_tokens: send token ids instead", "add_special_tokens")
        if body.stream and (body.use_beam_search or params.prompt_logprobs is not None and not _echoes(body)):
            name = "use_beam_search" if body.use_beam_search else "prompt_logprobs"
            raise ApiError(400, f"{name} goes without stream: its outcome is known at the end", name)
        if body.use_beam_search:
            self._check_of_beams(params)
        elif body.length_penalty is not None or body.early_stopping:
            raise ApiError(400, "length_penalty and early_stopping go with use_beam_search", "length_penalty")
        self.num_choices = len(body.branches) if body.branches else params.n
        self._params = params

    async def prepare(self) -> None:
        """Tokenise suffixes, beside the event loop."""
        if branches := self._body.branches:
            encode = self._service.llm.get_tokenizer().encode
            self._suffixes = await asyncio.to_thread(
                lambda: [encode(one, add_special_tokens=False) if isinstance(one, str) else one for one in branches]
            )

    def _check_of_beams(self, params: SamplingParams) -> None:
        plain = SamplingParams(max_tokens=None)
        for name in _NOT_OF_BEAMS:
            if getattr(params, name) != getattr(plain, name):
                raise ApiError(400, f"{name} goes without use_beam_search", name.removesuffix("_strings"))
        given = {**self._body.extra, **{name: getattr(self._body, name) for name in type(self._body).model_fields}}
        for name, neutral in _NEUTRAL.items():  # the checkpoint's defaults may have others
            if given.get(name) not in (None, neutral):
                raise ApiError(400, f"{name} goes without use_beam_search", name)

    @property
    def num_suffix_tokens(self) -> int:
        """Tokens of the suffixes of a prompt, each by itself."""
        return sum(map(len, self._suffixes))

    async def start(self, prompt: Any) -> Source:
        """Queue one prompt.

        Raises:
            ValueError: it cannot be served.
        """
        llm, body, params = self._service.llm, self._body, self._params
        if body.use_beam_search:
            most = params.max_tokens or llm.config.max_model_len
            searching = BeamSearchParams(
                params.n, min(most, llm.config.max_model_len - len(prompt["prompt_token_ids"])),
                length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
                early_stopping=bool(body.early_stopping), ignore_eos=params.ignore_eos,
                structured_outputs=params.structured_outputs,
            )  # fmt: skip
            return SearchSource(llm.beam_search([prompt], searching), params.n)
        if self._suffixes:
            suffixes: Any = self._suffixes
            if "prompt" in prompt and all(isinstance(suffix, str) for suffix in body.branches or ()):
                # Tokens of a text are not those of its parts.
                suffixes = body.branches
                prompt = {name: value for name, value in prompt.items() if name != "prompt_token_ids"}
            return await llm.add_branches(
                prompt, suffixes, replace(params, n=1), max_parallel_branches=body.max_parallel_branches,
                output_kind=self._kind,
            )  # fmt: skip
        return await llm.add(prompt, params, priority=body.priority or 0, output_kind=self._kind)


def _echoes(body: Any) -> bool:
    return bool(getattr(body, "echo", None))
