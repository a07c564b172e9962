"""The model card of the embedded EAGLE-3 head: what it is, how it was made, and what its drafts are worth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from jaxinfer.models.eagle3_config import Eagle3Config
from training.head_acceptance import DRAFTED, Chains
from training.inventory import DATA
from training.model_card import RunFacts


@dataclass(frozen=True)
class HeadFacts:
    """What a training run took and what it was given.

    Attributes:
        coverage: share of the written tokens that the draft words are.
        phases: drafted tokens of a start, and the share of the training's steps.
        passes: how often it saw every text.
        cases: held-out texts in the measurement.
    """

    run: RunFacts
    coverage: float
    phases: tuple[tuple[int, float], ...]
    passes: float
    cases: int


def depth_table(chains: Chains) -> str:
    """A row for each depth."""
    lines = ["| depth | reached | right | share |", "|---:|---:|---:|---:|"]
    for depth, (reached, right, share) in enumerate(zip(chains.reached, chains.right, chains.shares, strict=True), 1):
        lines.append(f"| {depth} | {reached} | {right} | {share:.1%} |")
    return "\n".join(lines)


def kind_table(by_kind: dict[str, Chains]) -> str:
    """A row for each kind of prompt."""
    lines = ["| kind | tokens | rounds | tokens a round |", "|---|---:|---:|---:|"]
    for kind, chains in by_kind.items():
        lines.append(f"| {kind} | {chains.tokens} | {chains.rounds} | {chains.accepted_length:.2f} |")
    return "\n".join(lines)


def write_head_card(
    path: Path,
    config: Eagle3Config,
    facts: HeadFacts,
    curve: dict[str, list[Any]],
    whole: Chains,
    by_kind: dict[str, Chains],
) -> None:
    """Fill in the model card and write it."""
    layer = config.layer
    template = Template((DATA / "head_model_card.md").read_text(encoding="utf-8"))
    text = template.substitute(
        parameters=f"{facts.run.parameters / 1e6:.2f}",
        hidden=layer.hidden_size,
        intermediate=layer.intermediate_size,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        words=config.draft_vocab_size,
        vocabulary=layer.vocab_size,
        capture=", ".join(map(str, config.capture)),
        coverage=f"{facts.coverage:.2%}",
        unrolled=facts.phases[-1][0],
        phases=", ".join(f"{unrolled} in {share:.0%}" for unrolled, share in facts.phases),
        steps=facts.run.steps,
        tokens=f"{facts.run.tokens / 1e6:.2f}",
        minutes=round(facts.run.seconds / 60),
        held_out_loss=f"{curve['held_out'][-1][1]:.3f}",
        passes=f"{facts.passes:.1f}",
        cases=facts.cases,
        drafted=DRAFTED,
        texts_tokens=whole.tokens,
        rounds=whole.rounds,
        accepted=f"{whole.accepted_length:.2f}",
        depths=depth_table(whole),
        kinds=kind_table(by_kind),
    )
    path.write_text(text, encoding="utf-8")
