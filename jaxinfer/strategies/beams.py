"""Beam search in the engine: each beam is a sequence of its own, which shares pages and is forked or dropped."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxinfer.branching.beam_search import BeamSearch, Extension
from jaxinfer.constraints.automaton import TokenAutomaton
from jaxinfer.engine.core import EngineCore
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.request_group import RequestGroup


class _State(NamedTuple):
    """Outcome of the latest choice. It is the source of truth of a search: requests are derived from it."""

    search: BeamSearch
    beams: tuple[Request, ...]  # in the order of `search.beams`, with their tokens and maybe one more; none: it is over
    error: str | None = None


class BeamRun:
    """Search for one prompt. In each step it waits until all beams have landed, then chooses their continuations.

    One continuation of a beam takes its place, further ones are forked from its pages, and a beam without any is
    dropped. The next state is computed beside the present one and replaces it in one assignment.

    Args:
        core: the engine.
        request_id: id of the search, and prefix of the ids of its beams.
        prompt: token ids, at least one.
        search: the bookkeeping that chooses.
        grammar: automaton that the beams follow; None: any text.
        cache_key: namespace of the prefix cache.

    Raises:
        ValueError: there are more beams than requests may run at once.
    """

    def __init__(
        self,
        core: EngineCore,
        request_id: str,
        prompt: Sequence[int],
        search: BeamSearch,
        grammar: TokenAutomaton[Any] | None = None,
        cache_key: Hashable = None,
    ) -> None:
        width, most = search.params.beam_width, core.config.max_num_seqs
        if width > most:
            raise ValueError(f"beam_width={width} needs as many requests at once, max_num_seqs is {most}")
        self._core, self._request_id = core, request_id
        self._eos = search.eos_token_ids if grammar is not None else frozenset[int]()
        self._max_total_tokens = len(prompt) + search.params.max_tokens
        self._params = SamplingParams(temperature=0.0, max_tokens=None, logprobs=search.num_candidates, ignore_eos=True)
        self._num_beams, self._grammar, self._cache_key = 0, grammar, cache_key
        first = self._beam(list(prompt))
        page_size = core.config.page_size
        self._group = RequestGroup(
            request_id, None, list(prompt), [first], page_size=page_size, branch_mode="batching", max_parallel=width,
            trunk_pages=(len(prompt) - 1) // page_size,
        )  # fmt: skip
        self._state = _State(search, (first,))

    def start(self) -> BeamRun:
        """Queue the first beam.

        Raises:
            ValueError: the prompt cannot be served; the search is over then.
        """
        try:
            self._core.add([self._group], search=self)
        except ValueError:
            self._state = _State(self._state.search, ())
            raise
        return self

    @property
    def search(self) -> BeamSearch:
        return self._state.search

    @property
    def beams(self) -> tuple[Request, ...]:
        return self._state.beams

    @property
    def is_done(self) -> bool:
        return not self._state.beams

    @property
    def error(self) -> str | None:
        """Reason why the search has failed."""
        return self._state.error

    def abort(self) -> None:
        """Abort the beams that are left and end the search."""
        left, self._state = self._state.beams, _State(self._state.search, ())
        self._core.drop_search(self)
        self._core.abort(*[beam.request_id for beam in left])

    def advance(self) -> bool:
        beams = self._state.beams
        if not beams:
            self._core.drop_search(self)  # it was aborted
            return True
        failed = [
            beam for beam in beams if beam.status in (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_ABORTED)
        ]
        if failed:
            self._end(self._state.search, RequestStatus.FINISHED_ABORTED, failed[0].error or "a beam was aborted")
            return True
        if not all([beam.is_held for beam in beams]):
            return False
        search = replace(self._state.search, hypotheses=list(self._state.search.hypotheses))
        extensions = search.step([self._candidates(beam) for beam in beams])
        if extensions:
            self._continue(search, extensions)
        else:
            self._end(search, RequestStatus.FINISHED_STOPPED)
        return True

    def restore(self) -> None:
        # A beam has the tokens that were chosen for it, or these and the next one, which no choice has seen yet.
        for beam, (tokens, _) in zip(self._state.beams, self._state.search.beams, strict=True):
            beam.is_held = beam.landed.num_tokens > beam.num_prompt_tokens + len(tokens)
            if not beam.is_held:
                beam.begin_with(tokens)

    def _continue(self, search: BeamSearch, extensions: Sequence[Extension]) -> None:
        before = self._state.beams
        parents = [before[extension.parent] for extension in extensions]
        beams: list[Request] = []
        for extension, parent, (tokens, _) in zip(extensions, parents, search.beams, strict=True):
            assert tokens[-1] == extension.token
            beams.append(parent if parent not in beams else self._child(parent, tokens))
        self._state = _State(search, tuple(beams))
        # Dropped beams make room for new ones. A fork is made before its parent continues.
        for beam in before:
            if beam not in parents and not beam.is_finished:
                self._core.finish(beam, RequestStatus.FINISHED_ABORTED)
        for beam, parent in zip(beams, parents, strict=True):
            if beam is not parent:
                self._core.fork(parent, beam)
        for beam, extension in zip(beams, extensions, strict=True):
            if beam in before:
                self._core.scheduler.steer(beam, extension.token)

    def _end(self, search: BeamSearch, status: RequestStatus, error: str | None = None) -> None:
        before, self._state = self._state.beams, _State(search, (), error)
        self._core.drop_search(self)
        for beam in before:
            if not beam.is_finished:
                self._core.finish(beam, status)

    def _beam(self, prompt: list[int]) -> Request:
        number = self._num_beams
        self._num_beams += 1
        return Request(
            f"{self._request_id}-{number}", prompt, self._params, self._max_total_tokens, publishes=False,
            is_steered=True, constraint=self._grammar, eos_token_ids=self._eos, cache_key=self._cache_key,
        )  # fmt: skip

    def _child(self, parent: Request, tokens: Sequence[int]) -> Request:
        child = self._beam(self._group.prompt_token_ids)
        child.group, child.trunk = parent.group, parent.trunk
        child.begin_with(tokens)
        child.continue_guard_of(parent)
        self._core.number(child)
        return child

    def _candidates(self, beam: Request) -> list[tuple[int, float]]:
        """Return the most likely tokens after a beam, with log probabilities; the sampled token is the most likely."""
        found = [(token, entry.logprob) for token, entry in beam.logprobs[-1].items()]
        return found[: self.search.num_candidates]
