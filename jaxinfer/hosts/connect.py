"""Connecting the engines that the processes of a team have built."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from jaxinfer.engine.transactions import Transactions
from jaxinfer.hosts.following import FollowingRunner
from jaxinfer.hosts.leading import LeadingRunner
from jaxinfer.hosts.team import Team, digest_of_engine
from jaxinfer.programs.runner import Runner


class ConnectedCore(Protocol):
    """What connecting uses of the engine; see `EngineCore`."""

    runner: Runner
    transactions: Transactions


def runner_for(team: Team | None) -> type[Runner]:
    """Return the runner of this process."""
    if team is None:
        return Runner
    return LeadingRunner if team.leads else FollowingRunner


def connect(team: Team, core: ConnectedCore, settings: Sequence[object]) -> None:
    """Connect the engines of all processes, each of which calls this.

    Args:
        settings: what has to be alike, besides programs and versions.

    Raises:
        RuntimeError: a process has another engine.
    """
    runner = core.runner
    digest = digest_of_engine(runner, settings)
    if isinstance(runner, LeadingRunner):
        followers = team.welcome(digest)
        runner.lead(followers)
        notes, check = core.transactions.notes, followers.check
        followers.on_loss = lambda: notes.add(check)  # the next step raises, and an idle thread wakes up for it
        transactions = weakref.ref(core.transactions)
        followers.is_stuck = lambda: (found := transactions()) is not None and found.runs
        weakref.finalize(runner, followers.end)
    elif isinstance(runner, FollowingRunner):
        runner.listen_to(team.come(digest))
