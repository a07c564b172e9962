"""Branches that grow round by round in the padded layout, each with the plain sequence that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from jaxinfer.textbook.alignment import AlignmentManager, AlignmentState

PAD = 7
MOST_BRANCHES = 6  # that there are ever

type Rounds = list[Callable[[], AlignmentState]]  # to be taken one after the other


@dataclass
class Story:
    """Rounds over branches that share a prefix, and what each of them is without padding."""

    prefix: list[int]
    num_branches: int
    rng: np.random.Generator
    sequences: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.manager = AlignmentManager(self.num_branches, pad_token_id=PAD, prefix_len=len(self.prefix))
        self.sequences = {branch: list(self.prefix) for branch in range(self.num_branches)}

    def some_tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, 101, count).tolist()

    def decode(self, *counts: int) -> AlignmentState:
        tokens = [self.some_tokens(count) for count in counts]
        state = self.manager.align_for_decode(counts, tokens)
        return self._grown(state, tokens)

    def join(self, new: list[int], *old: int) -> AlignmentState:
        tokens, prompts = [self.some_tokens(count) for count in old], [self.some_tokens(count) for count in new]
        state = self.manager.align_continuous_decode(prompts, tokens)
        return self._grown(state, tokens + prompts)

    def finish(self, branch: int) -> None:
        self.manager.remove_branch(branch)
        del self.sequences[branch]

    def _grown(self, state: AlignmentState, tokens: list[list[int]]) -> AlignmentState:
        for branch, grown in zip(state.branch_ids, tokens, strict=True):
            self.sequences.setdefault(branch, list(self.prefix)).extend(grown)
        return state


@st.composite
def random_rounds(draw) -> tuple[Story, Rounds]:
    """A story and its rounds."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    story = Story(rng.integers(0, 101, draw(st.integers(0, 14))).tolist(), draw(st.integers(1, 3)), rng)
    joined = 0

    def decode() -> AlignmentState:
        return story.decode(*rng.integers(0, 5, len(story.sequences)).tolist())

    def join() -> AlignmentState:
        return story.join([int(rng.integers(1, 9))], *rng.integers(0, 4, len(story.sequences)).tolist())

    def finish_one_and_decode() -> AlignmentState:
        if len(story.sequences) > 1:
            story.finish(int(rng.choice(list(story.sequences))))
        return decode()

    rounds: Rounds = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from([decode, decode, join, finish_one_and_decode]))
        if kind is join:
            joined += 1
        rounds.append(decode if joined > MOST_BRANCHES - 3 else kind)
    return story, rounds


def rounds_of_every_kind() -> tuple[Story, Rounds]:
    rng = np.random.default_rng(1)
    story = Story(rng.integers(0, 101, 5).tolist(), 3, rng)

    def finish_and_decode() -> AlignmentState:
        story.finish(0)
        return story.decode(1, 2, 1)

    return story, [
        lambda: story.decode(3, 1, 2),
        lambda: story.decode(1, 0, 2),
        lambda: story.join([6], 2, 1, 1),
        finish_and_decode,
    ]
