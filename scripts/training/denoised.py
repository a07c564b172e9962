"""Measures of unmasking rules: tokens per forward, tokens per second, and how many held-out answers are right."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxinfer import LLM, SamplingParams
from training.corpus import stream
from training.evaluation import scores_of
from training.scores import Score

AUTOREGRESSIVE, ONE_A_ROUND = "autoregressive", "one a round"
USUAL = "threshold 0.9"
RULES: dict[str, dict[str, Any]] = {
    # Nothing is surer than 1: what is left is the surest.
    ONE_A_ROUND: {"unmask": "hierarchy", "threshold": 1.0, "low_threshold": 1.0},
    **{f"threshold {value:g}": {"threshold": value} for value in (0.99, 0.95, 0.9, 0.8)},
    **{
        f"hierarchy {high:g}, {low:g}": {"unmask": "hierarchy", "threshold": high, "low_threshold": low}
        for high, low in ((0.95, 0.6), (0.9, 0.4))
    },
    **{f"factor {value:g}": {"unmask": "factor", "factor": value} for value in (0.1, 0.5)},
}
TIMED_PROMPTS, TIMED_TOKENS, ROUNDS = 8, 128, 3
BATCHES = (1, 8)
# What prompts and answers of as many rows as are scored at once take.
LIMITS: dict[str, Any] = {"max_num_seqs": 32, "kv_cache_tokens": 32 * 640}


@dataclass(frozen=True)
class Measured:
    """One way to decode: of its answers, and of its speed against that of one token a round, by batch."""

    name: str
    tokens_a_forward: float
    quality: float  # mean share of the checks, in percent
    scores: list[Score]
    tokens_per_second: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_figures(path: Path) -> list[Measured]:
    """The figures of a file that `scripts/measure_denoising.py` has written."""
    rules = json.loads(path.read_text(encoding="utf-8"))["rules"]
    for rule in rules:
        rule["scores"] = [Score(**score) for score in rule["scores"]]
        rule["tokens_per_second"] = {int(batch): speed for batch, speed in rule["tokens_per_second"].items()}
    return [Measured(**rule) for rule in rules]


def measure(base: Path, model: Path, cases: int, report: Callable[[str], None] = print) -> list[Measured]:
    """The autoregressive model and all `RULES` of the diffusion one, `cases` held-out prompts of each kind."""
    engines = {AUTOREGRESSIVE: partial(LLM, base, **LIMITS)}
    engines |= {name: partial(LLM, model, **LIMITS, diffusion_config=rule) for name, rule in RULES.items()}
    scored = {}
    for name, make in engines.items():
        llm = make()
        scores, _ = scores_of(llm, cases)
        metrics = llm.get_metrics()
        a_forward = 1.0 if name == AUTOREGRESSIVE else metrics.diffusion_tokens_per_forward
        quality = 100 * statistics.mean(each.share for each in scores)
        scored[name] = (a_forward, quality, scores)
        report(f"{name:20s} {a_forward:5.2f} tokens a forward, {quality:5.1f}% right")
        # The programs of all engines together take more maps of memory than Linux allows a process.
        del llm, metrics
        jax.clear_caches()
    speeds = _speeds({name: make() for name, make in engines.items()})
    return [
        Measured(name, a_forward, quality, scores, speeds[name])
        for name, (a_forward, quality, scores) in scored.items()
    ]


def _speeds(engines: dict[str, LLM]) -> dict[str, dict[int, float]]:
    """Tokens per second by batch, medians of rounds in which all engines take their turns."""
    texts = (sample.prompt for sample in stream(9, True) if sample.messages)
    prompts = list(itertools.islice(texts, TIMED_PROMPTS))
    params = SamplingParams(temperature=0.0, max_tokens=TIMED_TOKENS)
    found: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in BATCHES} for name in engines}
    for number, batch in itertools.product(range(ROUNDS + 1), BATCHES):
        for name, llm in engines.items():
            llm.reset_prefix_cache()
            begin, tokens = time.perf_counter(), 0
            for together in itertools.batched(prompts, batch):
                outputs = llm.chat(list(together), params, use_tqdm=False)
                tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            if number:  # the first time compiles
                found[name][batch].append(tokens / (time.perf_counter() - begin))
    return {
        name: {batch: statistics.median(values) for batch, values in batches.items()} for name, batches in found.items()
    }


def table_rows(measured: list[Measured]) -> list[list[str]]:
    """Cells of a table: name, tokens a forward, speed against one token a round for each batch, quality."""
    slowest = next(each for each in measured if each.name == ONE_A_ROUND).tokens_per_second
    return [
        [
            each.name, f"{each.tokens_a_forward:.2f}",
            *(f"{each.tokens_per_second[batch] / slowest[batch]:.2f}x" for batch in BATCHES),
            f"{each.quality:.1f}%",
        ]
        for each in measured
    ]  # fmt: skip


HEADINGS = ("rule", "tokens a forward", *(f"speed, batch {batch}" for batch in BATCHES), "right")


def draw(measured: list[Measured], path: Path) -> None:
    """Quality over tokens a forward, a line for each kind of rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8), dpi=100)
    plain = next(each for each in measured if each.name == AUTOREGRESSIVE)
    axes.axhline(plain.quality, color="grey", linestyle="--", label="autoregressive")
    for kind in (ONE_A_ROUND, "threshold", "hierarchy", "factor"):
        points = sorted(
            (each.tokens_a_forward, each.quality, each.name) for each in measured if each.name.startswith(kind)
        )
        axes.plot([x for x, *_ in points], [y for _, y, _ in points], "o-", label=kind)
        for x, y, name in points if kind != ONE_A_ROUND else ():
            axes.annotate(name.removeprefix(kind), (x, y), textcoords="offset points", xytext=(3, 4), fontsize=7)
    axes.set(xlabel="tokens a forward", ylabel="held-out checks right, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
