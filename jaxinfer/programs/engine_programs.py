"""The list of an engine's programs, which warm-up, planning and the tests of compiled text iterate over."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxinfer.programs.buckets import Buckets, lane_pages_for
from jaxinfer.programs.commit_tail import CommitTail
from jaxinfer.programs.decode_loop import DecodeLoop
from jaxinfer.programs.entry import Entry, EntryShape
from jaxinfer.programs.program import Program
from jaxinfer.programs.prompt_logprobs import PromptLogprobs
from jaxinfer.programs.step import Follower, Step


@dataclass(frozen=True)
class EnginePrograms:
    """The programs of plain decoding; strategies bring more."""

    step: Step
    entry: Entry
    prompt_logprobs: PromptLogprobs
    decode_loop: DecodeLoop
    commit_tail: CommitTail

    @classmethod
    def of(
        cls, buckets: Buckets, *, vocab_size: int, max_decode_steps: int, page_size: int, processed: bool = False
    ) -> EnginePrograms:
        """Return the programs with all shapes that an engine of these limits can need.

        Args:
            processed: log probabilities, see `Noting`.
        """
        sizes = tuple(buckets.hidden_sizes)
        lanes = buckets.all_lanes(lane_pages_for(max_decode_steps, page_size))
        return cls(
            Step(tuple(buckets.all_steps()), hidden_sizes=sizes, processed=processed),
            Entry(EntryShape.all_of(buckets.max_num_seqs, vocab_size)),
            PromptLogprobs(sizes),
            DecodeLoop(max_decode_steps, (*buckets.all_loops(), *lanes), processed),
            CommitTail(((1, page_size),)),
        )

    def followed_by(self, follower: Follower | None) -> EnginePrograms:
        """Return the programs with a step whose tokens the follower takes in; None: unchanged."""
        return self if follower is None else replace(self, step=replace(self.step, follower=follower))

    @property
    def all(self) -> list[Program]:
        """Programs that have shapes."""
        programs: list[Program] = [
            self.step, self.entry, self.prompt_logprobs, self.decode_loop, self.commit_tail,
        ]  # fmt: skip
        return [program for program in programs if program.shapes]
