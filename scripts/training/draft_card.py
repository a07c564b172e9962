"""The model card of the embedded draft model: what it is, how it was made, and what its proposals are worth."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

from jaxinfer.models.config import ModelConfig
from training.acceptance import DRAFTED, TEMPERATURE, Acceptance
from training.inventory import DATA
from training.model_card import RunFacts

Figures = dict[float, dict[str, Acceptance]]
REQUIRED_GREEDY = 0.6
"""Least share of drafted tokens that are accepted in chains at temperature 0."""
REQUIRED_OF_GREEDY = 0.9
"""Least part of that share at `TEMPERATURE`."""


def missed(figures: Figures) -> list[str]:
    """What was required and not reached, in words."""
    greedy, sampled = figures[0.0]["all"].chained, figures[TEMPERATURE]["all"].chained
    found = []
    if greedy < REQUIRED_GREEDY:
        found.append(f"{greedy:.1%} of {REQUIRED_GREEDY:.0%} in chains at temperature 0")
    if sampled < REQUIRED_OF_GREEDY * greedy:
        found.append(f"{sampled / greedy:.1%} of {REQUIRED_OF_GREEDY:.0%} of that at temperature {TEMPERATURE}")
    return found


def summary_rows(figures: Figures) -> list[str]:
    """A row of a table for each temperature."""
    rows = []
    for temperature, kinds in figures.items():
        each = kinds["all"]
        shares = (each.same_noise, each.most_likely, each.classic, each.chained)
        rows.append(f"| {temperature:g} | {each.tokens} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    return rows


def kind_rows(figures: Figures) -> list[str]:
    """A row of a table for each kind of prompt."""
    greedy, sampled = figures[0.0], figures[TEMPERATURE]
    return [
        f"| {kind} | {greedy[kind].tokens} | {greedy[kind].same_noise:.1%} | {greedy[kind].chained:.1%} "
        f"| {sampled[kind].same_noise:.1%} | {sampled[kind].chained:.1%} |"
        for kind in greedy
        if kind != "all"
    ]


def write_draft_card(
    path: Path, model: ModelConfig, facts: RunFacts, curve: dict[str, list[Any]], figures: Figures, cases: int
) -> None:
    """Fill in the model card and write it."""
    failures = missed(figures)
    template = Template((DATA / "draft_model_card.md").read_text(encoding="utf-8"))
    text = template.substitute(
        parameters=f"{facts.parameters / 1e6:.2f}",
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        steps=facts.steps,
        tokens=f"{facts.tokens / 1e6:.2f}",
        minutes=round(facts.seconds / 60),
        held_out_loss=f"{curve['held_out'][-1][1]:.3f}",
        cases=cases,
        drafted=DRAFTED,
        acceptance="\n".join(summary_rows(figures)),
        verdict=f"Not reached: {'; '.join(failures)}."
        if failures
        else f"Every required share is reached: {REQUIRED_GREEDY:.0%} in chains at temperature 0, and "
        f"{REQUIRED_OF_GREEDY:.0%} of that share at temperature {TEMPERATURE}.",
        kinds="\n".join(kind_rows(figures)),
    )
    path.write_text(text, encoding="utf-8")
