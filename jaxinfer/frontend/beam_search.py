"""Beam search over several prompts, as a job that runs as many searches at once as `max_num_seqs` has room for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxinfer.branching.beam_search import BeamSearch, BeamSearchParams
from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.engine.core import EngineCore
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.frontend.jobs import Answer, Item
from jaxinfer.frontend.prompts import TokenizedPrompt, as_prompt_list
from jaxinfer.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from jaxinfer.strategies.beams import BeamRun
from jaxinfer.tokenizer import Tokenizer


class BeamSearchJob:
    """Job of the beam searches for some prompts.

    Args:
        core: the engine, in which each search queues and steers its own beams.
        prompts: one or many, as `LLM.generate` takes them.

    Raises:
        ValueError: a prompt or the grammar cannot be served, or the model is a diffusion model.
    """

    name, stream = "a beam search", False

    def __init__(
        self,
        core: EngineCore,
        inputs: InputProcessor,
        tokenizer: Tokenizer | None,
        prompts: Any,
        params: BeamSearchParams,
    ) -> None:
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, got {params!r}")
        if inputs.model_config.mask_token_id is not None:
            raise ValueError("beam search goes from token to token, and a diffusion model makes blocks of them at once")
        self._core, self._inputs, self._tokenizer, self._params = core, inputs, tokenizer, params
        self._prompts = inputs.tokenized(as_prompt_list(prompts))
        try:
            self._grammar = inputs.grammar_of(params.structured_outputs)
        except ConstraintError as error:
            raise ValueError(str(error)) from error
        self._runs: list[tuple[TokenizedPrompt, BeamRun]] = []

    def begin(self) -> Sequence[Item] | Answer[list[BeamSearchOutput]]:
        """Start as many searches as fit."""
        return self._advance()

    def take(self, outputs: Sequence[RequestOutput]) -> Sequence[Item] | Answer[list[BeamSearchOutput]]:
        """Start further searches in place of finished ones."""
        return self._advance()

    def abort(self) -> None:
        """Abort all searches."""
        for _, run in self._runs:
            run.abort()

    def _advance(self) -> Sequence[Item] | Answer[list[BeamSearchOutput]]:
        limits, width = self._inputs.config, self._params.beam_width
        most = max(1, limits.max_num_seqs // width)
        running = sum(not run.is_done for _, run in self._runs)
        while running < most and len(self._runs) < len(self._prompts):
            number, prompt = self._prompts[len(self._runs)]
            max_tokens = min(self._params.max_tokens, limits.max_model_len - len(prompt.token_ids))
            search = BeamSearch(dataclasses.replace(self._params, max_tokens=max_tokens), self._inputs.eos_token_ids)
            run = BeamRun(self._core, number, prompt.token_ids, search, self._grammar, prompt.cache_salt)
            self._runs.append((prompt, run))
            run.start()
            running += 1
        return () if running else Answer(self._outputs())

    def _outputs(self) -> list[BeamSearchOutput]:
        outputs: list[BeamSearchOutput] = []
        for index, (prompt, run) in enumerate(self._runs):
            if run.error is not None:
                raise RuntimeError(f"beam search for prompt {index} failed: {run.error}")
            sequences = []
            for found in run.search.hypotheses:
                tokens, text = list(found.tokens), ""
                if self._tokenizer is not None:
                    text = self._tokenizer.decode_after(prompt.token_ids, tokens[:-1] if found.ended else tokens)
                reason = "stop" if found.ended else "length"
                sequences.append(BeamSearchSequence(tokens, text, found.logprob, found.score, reason))
            outputs.append(BeamSearchOutput(prompt.text, prompt.token_ids, sequences))
        return outputs
