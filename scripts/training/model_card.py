"""The model card of the embedded target: a page of figures, samples and limits, and pictures of the losses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

from training.inventory import DATA, actions, combinations, things
from training.scores import Score
from training.toolbox import purposes

CARD_SAMPLES = ("plan", "expansion", "reading", "to_json", "direct", "guide", "arithmetic")
TOOL_SAMPLES = ("tool_call", "tool_calls", "tool_none", "tool_result", "tool_chain")
STAGES = "training.json"


def curve_of(stage: int) -> str:
    """The picture of a training: 0 is the one from nothing; those with tools that continued it count from 1."""
    return "loss_curve.png" if stage == 0 else "tools_loss_curve.png" if stage == 1 else f"tools_loss_curve_{stage}.png"


@dataclass(frozen=True)
class RunFacts:
    """What one training run took: parameters, corpus tokens, optimizer steps, seconds of the training loop."""

    parameters: int
    tokens: int
    steps: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Stage:
    """One training of a checkpoint: what it took, and its last held-out losses in nats per answer token; `tool_loss` is
    that of conversations with tools."""

    facts: RunFacts
    held_out_loss: float
    tool_loss: float | None = None


def read_stages(directory: Path) -> list[Stage]:
    """The trainings that made the checkpoint of a directory, the first one first."""
    found = json.loads((directory / STAGES).read_text(encoding="utf-8"))
    return [Stage(RunFacts(**each["facts"]), each["held_out_loss"], each["tool_loss"]) for each in found]


def write_stages(directory: Path, stages: list[Stage]) -> None:
    """Keep with a checkpoint which trainings made it."""
    text = json.dumps([asdict(stage) for stage in stages], indent=2)
    (directory / STAGES).write_text(text + "\n", encoding="utf-8")


def draw_curve(
    curve: dict[str, list[Any]], path: Path, unit: str = "nats per token", counted: str = "answers 1, prompts 0.25"
) -> None:
    """A picture of the training loss, in which tokens count as `counted` says, and the held-out loss over the steps.
    Where the curve has `held_out_tools`, that is the held-out loss of conversations with tools."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), dpi=100)
    axes.plot(*zip(*curve["training"], strict=True), label=f"training ({counted})")
    axes.plot(*zip(*curve["held_out"], strict=True), label="held out (answers only)")
    if "held_out_tools" in curve:
        axes.plot(*zip(*curve["held_out_tools"], strict=True), label="held out, with tools (answers only)")
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
    for kind in (*CARD_SAMPLES, *TOOL_SAMPLES):
        for case in shown.get(kind, ())[:1]:
            asked = case["prompt"] if kind in TOOL_SAMPLES else f"user: {case['prompt']}"
            parts.append(f"**{kind}**\n\n```text\n{asked}\n\nassistant: {case['answer']}\n```")
    return "\n\n".join(parts)


def _with_tools(stages: list[Stage]) -> dict[str, str]:
    """What the card says of the trainings with tools, by the names of the template's places."""
    template = Template((DATA / "model_card_tools.md").read_text(encoding="utf-8"))
    facts, last = [stage.facts for stage in stages], stages[-1]
    again = (
        f" It was done {len(stages)} times, each time from the weights of the time before and with a schedule of its "
        "own; the figures are sums, and the losses those of the end. From the second time on, conversations with tools "
        "have nearly two thirds of the tokens."
    )
    if len(stages) > 2:
        again += " From the third time on, half of the calls are of tools most of whose names are made up."
    section = template.substitute(
        steps=sum(each.steps for each in facts),
        tokens=f"{sum(each.tokens for each in facts) / 1e6:.2f}",
        minutes=round(sum(each.seconds for each in facts) / 60),
        again=again if len(stages) > 1 else "",
        training_tools=len(purposes(False)),
        held_out_tools=len(purposes(True)),
        held_out_loss=f"{last.held_out_loss:.3f}",
        tool_loss=f"{last.tool_loss:.3f}",
        pictures="\n".join(f"![loss, with tools]({curve_of(number + 1)})" for number in range(len(stages))),
    )
    further = "".join(
        f"python scripts/train_tiny.py --continue --seed {number} # further, with other samples\n"
        for number in range(1, len(stages))
    )
    return {
        "calls": ", and calls tools",
        "tool_row": "| tools in the system turn, and a request that one of them is for | `<tool_call>`, "
        '`{"name": ..., "arguments": ...}`, `</tool_call>`, each on a line of its own; several calls follow each '
        "other. See *Tools* |\n",
        "continue_command": "python scripts/train_tiny.py --continue # the same weights, with tools: training, "
        f"conversion, scores, this page\n{further}",
        "tools": f"{section}\n",
    }


WITHOUT_TOOLS = {"calls": "", "tool_row": "", "continue_command": "", "tools": ""}


def write_card(
    path: Path,
    stages: list[Stage],
    scores: list[Score],
    perplexities: tuple[float, float],
    shown: dict[str, list[dict[str, Any]]],
) -> None:
    """Fill in the model card and write it. Those after the first are trainings with tools."""
    missed = [each for each in scores if not each.passed]
    verdict = (
        "Every required share is reached."
        if not missed
        else "Not reached: " + "; ".join(f"{m.kind} ({m.check}) {m.share:.1%}" for m in missed) + "."
    )
    facts = stages[0].facts
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
        held_out_loss=f"{stages[0].held_out_loss:.3f}",
        verdict=verdict,
        table=_table(scores),
        perplexity_all=f"{perplexities[0]:.3f}",
        perplexity_answers=f"{perplexities[1]:.3f}",
        samples=_samples(shown),
        **(_with_tools(stages[1:]) if len(stages) > 1 else WITHOUT_TOOLS),
    )
    path.write_text(text, encoding="utf-8")
