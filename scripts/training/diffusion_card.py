"""The model card of the embedded diffusion model: what it is, how it was made, how it answers beside `tiny`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

from jaxinfer.models.config import ModelConfig
from training.denoised import AUTOREGRESSIVE, HEADINGS, ONE_A_ROUND, USUAL, Measured, table_rows
from training.inventory import DATA
from training.model_card import RunFacts

MOST_LOST = 3.0
"""Points of quality that deciding on several tokens at once may cost."""
LEAST_A_FORWARD, LEAST_FASTER = 3.0, 2.0


def missed(measured: list[Measured]) -> list[str]:
    """What was required of the usual threshold and not reached, in words."""
    usual, slow = (next(each for each in measured if each.name == name) for name in (USUAL, ONE_A_ROUND))
    faster = usual.tokens_per_second[1] / slow.tokens_per_second[1]
    found = []
    if usual.tokens_a_forward < LEAST_A_FORWARD:
        found.append(f"{usual.tokens_a_forward:.2f} of {LEAST_A_FORWARD:g} tokens a forward")
    if slow.quality - usual.quality > MOST_LOST:
        found.append(f"{slow.quality - usual.quality:.1f} points lost, of {MOST_LOST:g}")
    if faster < LEAST_FASTER:
        found.append(f"{faster:.2f} times as fast, of {LEAST_FASTER:g}")
    return found


def _taken(facts: RunFacts) -> str:
    return f"{facts.steps} steps, {facts.tokens / 1e6:.2f} million tokens, {facts.seconds / 60:.0f} minutes"


def write_diffusion_card(
    path: Path,
    model: ModelConfig,
    parts: Sequence[RunFacts],
    last_loss: float,
    measured: list[Measured],
) -> None:
    """Fill in the model card and write it. `last_loss` is the held-out one, in nats, after the third part."""
    assert model.experts is not None
    failures = missed(measured)
    shown = [next(each for each in measured if each.name == name) for name in (AUTOREGRESSIVE, ONE_A_ROUND, USUAL)]
    checks = []
    for same in zip(*(each.scores for each in shown), strict=True):
        shares = " | ".join(f"{score.share:.1%}" for score in same)
        checks.append(f"| {same[0].kind} | {same[0].check} | {same[0].cases} | {shares} |")
    template = Template((DATA / "diffusion_model_card.md").read_text(encoding="utf-8"))
    text = template.substitute(
        parameters=f"{parts[0].parameters / 1e6:.2f}",
        layers=model.num_layers,
        hidden=model.hidden_size,
        block=model.block_size,
        experts=model.experts.num_experts,
        chosen=model.experts.experts_per_token,
        inner=model.experts.intermediate_size,
        shared=model.experts.shared_size,
        groups=model.experts.num_groups,
        kept=model.experts.kept_groups,
        first=_taken(parts[0]),
        second=_taken(parts[1]),
        third=_taken(parts[2]),
        fourth=_taken(parts[3]),
        fifth=_taken(parts[4]),
        last_loss=f"{last_loss:.3f}",
        cases=max(score.cases for score in measured[0].scores),
        headings=f"| {' | '.join(HEADINGS)} |\n|---|{'---:|' * (len(HEADINGS) - 1)}",
        rules="\n".join(f"| {' | '.join(cells)} |" for cells in table_rows(measured)),
        verdict=f"Not reached at threshold 0.9: {'; '.join(failures)}."
        if failures
        else f"What is required at threshold 0.9 is reached: {LEAST_A_FORWARD:g} tokens a forward, at most "
        f"{MOST_LOST:g} points below one token a round, and {LEAST_FASTER:g} times its speed.",
        checks="\n".join(checks),
    )
    path.write_text(text, encoding="utf-8")
