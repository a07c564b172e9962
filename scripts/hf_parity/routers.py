"""Which experts the routers of a torch model choose, and how clearly: rounding must not turn a recorded choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

Run = tuple[Any, torch.Tensor, torch.Tensor | None]  # a router, its rows [tokens, hidden], a bias [experts]


@dataclass(frozen=True)
class Routing:
    """How scores become a choice; with groups, only the experts of the best groups can be chosen."""

    top_k: int
    is_sigmoid: bool = False  # of every logit by itself, plus a bias that only chooses; else softmax
    num_groups: int = 1
    kept_groups: int = 1


@dataclass(frozen=True)
class Chosen:
    """What a model's routers chose for some tokens."""

    experts: list[torch.Tensor]  # per router, [tokens, top_k], sorted
    smallest_gap: float  # between what was chosen, experts or groups, and the best that was not
    uses_every_expert: bool


@contextmanager
def watch_routers(model: Any) -> Iterator[list[Run]]:
    """While it is open, its list gets each router that runs, the rows it is given and a bias given with them."""
    seen: list[Run] = []

    def keep(router: Any, given: tuple[torch.Tensor, ...]) -> None:
        rows = given[0].detach().reshape(-1, given[0].shape[-1])
        seen.append((router, rows, given[1] if len(given) > 1 else None))

    routers = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", ".router"))]
    hooks = [router.register_forward_pre_hook(keep) for router in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _scores(router: Any, rows: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """Scores [tokens, experts] that experts are chosen by."""
    if hasattr(router, "per_expert_scale"):  # Gemma 4: rows are normed first
        return router.proj(router.norm(rows) * router.scale * router.scalar_root_size).softmax(-1)
    logits = rows @ router.weight.T
    if getattr(router, "bias", None) is not None:  # GPT-OSS
        logits = logits + router.bias
    cap = getattr(router, "router_logit_softcapping", 0.0)
    if cap > 0:
        logits = cap * torch.tanh(logits / cap)
    if not routing.is_sigmoid:
        return logits.softmax(-1)
    # The bias of MiniMax's router belongs to the layer around it, which gives it along.
    own = getattr(router, "expert_bias", getattr(router, "e_score_correction_bias", None))
    return logits.sigmoid() + (own if bias is None else bias)


@torch.no_grad()
def chosen_experts(seen: list[Run], routing: Routing) -> Chosen:
    """What the routers chose that `watch_routers` saw, worked out from their weights."""
    experts, gaps, used = [], [], []
    for router in dict.fromkeys(router for router, *_ in seen):
        runs = [run for run in seen if run[0] is router]
        scores = _scores(router, torch.cat([rows for _, rows, _ in runs]), runs[0][2], routing)
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
