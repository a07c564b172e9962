"""Random stories of branches: the same events for managers of either mode, with what each branch then is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from jaxinfer.textbook.branching import BranchStateManager

MOST_BRANCHES, CAPACITY = 5, 120


@dataclass
class Story:
    """Managers that live through the same events, and the own tokens of every branch."""

    prefix_len: int
    rng: np.random.Generator
    managers: list[BranchStateManager]
    own: dict[int, list[int]] = field(default_factory=dict)
    started: int = 0

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, 101, count).tolist()

    def add(self) -> None:
        if self.started == MOST_BRANCHES:
            return
        branch, prompt = self.started, self.tokens(int(self.rng.integers(1, 6)))
        for manager in self.managers:
            manager.add_branch(branch, prompt)
        self.own[branch], self.started = prompt, branch + 1

    def decode(self) -> list:
        accepted = [self.tokens(int(count)) for count in self.rng.integers(0, 4, len(self.own))]
        for branch, tokens in zip(self.own, accepted, strict=True):
            self.own[branch] = self.own[branch] + tokens
        return [manager.prepare_decode_inputs(list(map(len, accepted)), accepted) for manager in self.managers]

    def remove(self) -> None:
        if len(self.own) > 1:
            branch = int(self.rng.choice(list(self.own)))
            for manager in self.managers:
                manager.remove_branch(branch)
            del self.own[branch]


@st.composite
def stories(draw, modes: tuple[bool, ...] = (True, False)) -> tuple[Story, list[str]]:
    """A story that has begun with two branches, and the events that follow."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    managers = [BranchStateManager(CAPACITY, None, mode, MOST_BRANCHES) for mode in modes]
    story = Story(draw(st.integers(0, 7)), rng, managers)
    for manager in managers:
        manager.init_prefix(story.prefix_len)
    story.add()
    story.add()
    return story, draw(st.lists(st.sampled_from(["add", "decode", "decode", "remove"]), max_size=8))
