"""Which experts the routers of a torch model choose, and how clearly: rounding must not turn a recorded choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class Routing:
    """How scores become a choice; with groups, only the experts of the best groups can be chosen."""

    top_k: int
    is_sigmoid: bool = False  # of every logit by itself, plus the router's bias; else softmax
    num_groups: int = 1
    kept_groups: int = 1


@dataclass(frozen=True)
class Chosen:
    """What a model's routers chose for some tokens."""

    experts: list[torch.Tensor]  # per router, [tokens, top_k], sorted
    smallest_gap: float  # between what was chosen, experts or groups, and the best that was not
    uses_every_expert: bool


@contextmanager
def watch_routers(model: Any) -> Iterator[list[tuple[Any, torch.Tensor]]]:
    """While it is open, its list gets each router that runs and the rows it is given."""
    seen: list[tuple[Any, torch.Tensor]] = []

    def keep(router: Any, given: tuple[torch.Tensor, ...]) -> None:
        seen.append((router, given[0].detach().reshape(-1, given[0].shape[-1])))

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_pre_hook(keep) for router in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def chosen_experts(seen: list[tuple[Any, torch.Tensor]], routing: Routing) -> Chosen:
    """What the routers chose that `watch_routers` saw, worked out from their weights."""
    experts, gaps, used = [], [], []
    for router in dict.fromkeys(router for router, _ in seen):
        rows = torch.cat([given for by, given in seen if by is router])
        logits = rows @ router.weight.detach().T
        scores = logits.sigmoid() + router.expert_bias if routing.is_sigmoid else logits.softmax(-1)
        grouped = scores.reshape(len(scores), routing.num_groups, -1)
        if routing.kept_groups < routing.num_groups:
            of_groups = grouped.topk(2).values.sum(-1)
            best = of_groups.topk(routing.kept_groups + 1)
            gaps.append(best.values[:, -2] - best.values[:, -1])
            is_kept = torch.zeros_like(of_groups).scatter(1, best.indices[:, :-1], 1).bool()
            grouped = grouped.masked_fill(~is_kept[..., None], -torch.inf)
        best = grouped.flatten(1).topk(routing.top_k + 1)
        gaps.append(best.values[:, -2] - best.values[:, -1])
        experts.append(best.indices[:, :-1].sort().values)
        used.append(experts[-1].unique().numel() == scores.shape[-1])
    return Chosen(experts, float(torch.cat(gaps).min()), all(used))
