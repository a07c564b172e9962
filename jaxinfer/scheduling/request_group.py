"""Sequences that share a prefix: samples of a prompt, or branches of an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from jaxinfer.branching.branch_state import BranchLanes
from jaxinfer.outputs import RequestMetrics
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request


class RequestGroup:
    """A user's request for several sequences, its members, which are returned as one output.

    The prefix that all members share is computed once, in whole pages, by a request that samples nothing: the trunk. It
    holds its pages while members are unfinished; only if pages are needed while no member runs is it released, and
    computed again later. At most `max_parallel` members run at once; when one ends, the next is queued.

    Args:
        request_id: id of the group.
        prompt, prompt_token_ids: the prompt that the output reports.
        members: the sequences, in the order of the outputs.
        page_size: page size of the pool.
        branch_mode: "in_one_sequence": decode launches read the pages that members share once for all of them;
            "batching": once for each.
        max_parallel: most members that run at once; None: all.
        trunk_pages: how many pages of the shared prefix are the trunk; None: all of them.
        predicted: how many tokens each member is expected to have: the longest starts first; None: in their order.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        members: Sequence[Request],
        *,
        page_size: int,
        branch_mode: str,
        max_parallel: int | None = None,
        predicted: Sequence[int] | None = None,
        trunk_pages: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        self.members = list(members)
        self.branch_mode = branch_mode
        self.max_parallel = len(self.members) if max_parallel is None else max_parallel
        order = list(range(len(self.members)))
        if predicted is not None:
            order.sort(key=lambda index: -predicted[index])
        self.order = [self.members[index] for index in order]
        self.pending: deque[Request] = deque()  # members that wait for others to end
        self.num_unfinished = len(self.members)
        self.num_running = 0
        self.has_begun = False
        sharing = [member for member in self.members if member.sampling_params.prompt_logprobs is None]
        if trunk_pages is None:
            trunk_pages = shared_pages([member.prompt_token_ids for member in sharing], page_size)
        length = trunk_pages * page_size
        self.trunk = _trunk_of(self, sharing[0], length) if length else None
        self.branches = BranchLanes(page_size, branch_mode)
        if self.trunk is not None:
            self.branches.init_prefix(self.trunk)
        for branch, member in enumerate(self.members):
            member.group, member.branch = self, branch
        for member in sharing if self.trunk is not None else ():
            member.trunk, member.shares_lane = self.trunk, branch_mode == "in_one_sequence"
            self.branches.add_branch(member.branch, member)

    def share_nothing(self) -> None:
        """Let each member compute all of its prompt."""
        self.trunk = None
        for member in self.members:
            member.trunk, member.shares_lane = None, False

    def metrics(self) -> RequestMetrics:
        """Return the metrics of all members together: first and last times, and sums of counts."""
        found = [member.metrics for member in self.members]

        def among(name: str, choose: Callable[[list[float]], float]) -> float | None:
            times = [value for one in found if (value := getattr(one, name)) is not None]
            return choose(times) if times else None

        counts = ("num_preemptions", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
        return RequestMetrics(
            min(one.arrival_time for one in found),
            first_scheduled_time=among("first_scheduled_time", min),
            first_token_time=among("first_token_time", min),
            last_token_time=among("last_token_time", max),
            finished_time=among("finished_time", max),
            **{name: sum(getattr(one, name) for one in found) for name in counts},
        )


def shared_pages(prompts: Sequence[Sequence[int]], page_size: int) -> int:
    """Return how many whole pages of tokens all prompts begin with; each keeps at least a token of its own."""
    if len(prompts) < 2:
        return 0
    length = min(map(len, prompts)) - 1
    first = prompts[0]
    for prompt in prompts[1:]:
        if list(prompt[:length]) != list(first[:length]):
            length = next(i for i in range(length) if prompt[i] != first[i])
    return length // page_size


def _trunk_of(group: RequestGroup, member: Request, length: int) -> Request:
    params = SamplingParams(skip_reading_prefix_cache=member.sampling_params.skip_reading_prefix_cache)
    return Request(
        request_id=f"{group.request_id}-trunk",
        prompt_token_ids=member.prompt_token_ids[:length],
        sampling_params=params,
        max_total_tokens=length,
        priority=member.priority,
        cache_key=member.cache_key,
        is_trunk=True,
        group=group,
    )
