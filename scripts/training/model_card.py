"""The model card of the embedded target: a page of figures, samples and limits, and the picture of the loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

from training.inventory import DATA, actions, combinations, things
from training.scores import Score

CARD_SAMPLES = ("plan", "expansion", "reading", "to_json", "direct", "guide", "arithmetic")


@dataclass(frozen=True)
class RunFacts:
    """What one training run took: parameters, corpus tokens, optimizer steps, seconds of the training loop."""

    parameters: int
    tokens: int
    steps: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def draw_curve(
    curve: dict[str, list[Any]], path: Path, unit: str = "nats per token", counted: str = "answers 1, prompts 0.25"
) -> None:
    """A picture of the training loss, in which tokens count as `counted` says, and the held-out loss over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), dpi=100)
    axes.plot(*zip(*curve["training"], strict=True), label=f"training ({counted})")
    axes.plot(*zip(*curve["held_out"], strict=True), label="held out (answers only)")
    axes.set(xlabel="step", ylabel=unit, yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def _table(scores: list[Score]) -> str:
    lines = ["| kind | check | right | share | required |", "|---|---|---:|---:|---:|"]
    for each in scores:
        required = "" if each.threshold is None else f"{each.threshold:.0%}"
        lines.append(f"| {each.kind} | {each.check} | {each.right}/{each.cases} | {each.share:.1%} | {required} |")
    return "\n".join(lines)


def _samples(shown: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    for kind in CARD_SAMPLES:
        case = shown[kind][0]
        parts.append(f"**{kind}**\n\n```text\nuser: {case['prompt']}\n\nassistant: {case['answer']}\n```")
    return "\n\n".join(parts)


def write_card(
    path: Path,
    facts: RunFacts,
    curve: dict[str, list[list[float]]],
    scores: list[Score],
    perplexities: tuple[float, float],
    shown: dict[str, list[dict[str, Any]]],
) -> None:
    """Fill in the model card and write it."""
    missed = [each for each in scores if not each.passed]
    verdict = (
        "Every required share is reached."
        if not missed
        else "Not reached: " + "; ".join(f"{m.kind} ({m.check}) {m.share:.1%}" for m in missed) + "."
    )
    template = Template((DATA / "model_card.md").read_text(encoding="utf-8"))
    text = template.substitute(
        parameters=f"{facts.parameters / 1e6:.2f}",
        steps=facts.steps,
        tokens=f"{facts.tokens / 1e6:.2f}",
        minutes=round(facts.seconds / 60),
        actions=len(actions()),
        points=sum(len(action.points) for action in actions()),
        objects=sum(len(members) for members in things().values()),
        training_pairs=len(combinations(False)),
        held_out_pairs=len(combinations(True)),
        held_out_loss=f"{curve['held_out'][-1][1]:.3f}",
        verdict=verdict,
        table=_table(scores),
        perplexity_all=f"{perplexities[0]:.3f}",
        perplexity_answers=f"{perplexities[1]:.3f}",
        samples=_samples(shown),
    )
    path.write_text(text, encoding="utf-8")
