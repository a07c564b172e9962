"""Beam search in the engine: beams are sequences of their own, which share pages and are forked and given up."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.branching.beam_search import BeamSearch
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.request_group import RequestGroup
from jaxinfer.engine.scheduler import Landing
from jaxinfer.sampling_params import SamplingParams


class BeamRun:
    """The search for one prompt. Every step it waits until all beams have landed, chooses, and says how each goes on:
    one continuation of a beam takes its place, others begin with its pages, and beams without any are given up.

    Args:
        core: the engine.
        request_id: of the search; those of beams begin with it.
        prompt: token ids, at least one.
        search: what chooses.

    Raises:
        ValueError: there are more beams than requests may run at once. (All searches that run at the same time have to
            fit in, because beams that have landed keep their seats until the others have.)
    """

    def __init__(self, core: EngineCore, request_id: str, prompt: Sequence[int], search: BeamSearch) -> None:
        width, most = search.params.beam_width, core.config.max_num_seqs
        if width > most:
            raise ValueError(f"beam_width={width} needs as many requests at once, max_num_seqs is {most}")
        self.search = search
        self._core, self._request_id = core, request_id
        self._max_total_tokens = len(prompt) + search.params.max_tokens
        self._params = SamplingParams(temperature=0.0, max_tokens=None, logprobs=search.num_candidates, ignore_eos=True)
        self._num_beams = 0
        first = self._beam(list(prompt))
        page_size = core.config.page_size
        self._group = RequestGroup(
            request_id, None, list(prompt), [first], page_size=page_size, branch_mode="batching",
            trunk_pages=(len(prompt) - 1) // page_size,
        )  # fmt: skip
        self._live = [first]
        core.landing_listeners.append(self._take)
        core.add_group(self._group)

    @property
    def is_done(self) -> bool:
        return not self._live

    def abort(self) -> None:
        """Give up what is left of the search."""
        if self.is_done:
            return
        self._core.scheduler.finish_requests(self._unfinished(), RequestStatus.FINISHED_ABORTED)
        self._end()

    def _beam(self, prompt: list[int]) -> Request:
        number = self._num_beams
        self._num_beams += 1
        return Request(
            f"{self._request_id}-{number}", prompt, self._params, self._max_total_tokens, publishes=False,
            is_steered=True,
        )  # fmt: skip

    def _take(self, landings: Sequence[Landing]) -> None:
        landed = [landing.request for landing in landings if landing.request in self._live]
        for beam in landed:
            beam.hold()
        if landed and all(beam.is_held for beam in self._live):
            self._choose()

    def _choose(self) -> None:
        scheduler = self._core.scheduler
        extensions = self.search.step([self._candidates(beam) for beam in self._live])
        if not extensions:
            scheduler.finish_requests(self._unfinished(), RequestStatus.FINISHED_STOPPED)
            self._end()
            return
        going_on: dict[int, Request] = {}
        beams: list[Request] = []
        forks: list[tuple[Request, Request]] = []
        for extension in extensions:
            parent = self._live[extension.parent]
            if extension.parent not in going_on:
                going_on[extension.parent] = parent
                beams.append(parent)
                continue
            child = self._beam(self._group.prompt_token_ids)
            child.token_ids += [*parent.output_token_ids[:-1], extension.token]
            forks.append((parent, child))
            beams.append(child)
        # Beams that are given up make room for those that begin; forks are made before their parents go on.
        given_up = [beam for index, beam in enumerate(self._live) if index not in going_on]
        scheduler.finish_requests(given_up, RequestStatus.FINISHED_ABORTED)
        for parent, child in forks:
            self._core.fork(parent, child)
        for extension, beam in zip(extensions, beams, strict=True):
            if beam is self._live[extension.parent]:
                beam.steer(extension.token)
        self._live = beams

    def _candidates(self, beam: Request) -> list[tuple[int, float]]:
        """The most likely tokens after a beam; the one that was sampled is the most likely one itself."""
        found = [(token, entry.logprob) for token, entry in beam.logprobs[-1].items()]
        return found[: self.search.num_candidates]

    def _unfinished(self) -> list[Request]:
        """Those that have not come to their greatest length."""
        return [beam for beam in self._live if not beam.is_finished]

    def _end(self) -> None:
        self._live = []
        self._core.landing_listeners.remove(self._take)
