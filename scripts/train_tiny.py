"""Make the embedded checkpoint: from nothing, or from itself with tools; training, conversion, scores, model card."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxinfer.checkpoint.directory import embedded_checkpoint
from training.beginnings import from_checkpoint, from_nothing
from training.corpus import held_out_cases, stream
from training.evaluation import evaluate, perplexity
from training.huge_pages import begin_with_huge_pages
from training.initialization import Params
from training.loop import History, batches_of, make_evaluation, module_of, row_losses, train
from training.model_card import RunFacts, Stage, curve_of, draw_curve, read_stages, write_card, write_stages
from training.options import empty_source
from training.packing import Document, Packer, Rows, documents_of, pack_rows
from training.tokenizer import encode_document
from training.watch import make_watch
from training.writing import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
WATCH_CASES = 40
HELD_OUT = ("plan", "expansion", "reading", "world", "to_json")
HELD_OUT_TOOLS = ("tool_call", "tool_calls", "tool_none", "tool_result", "tool_chain")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--continue", dest="base", type=Path, nargs="?", const=embedded_checkpoint(), metavar="CHECKPOINT",
        help="teach tools to this checkpoint, the embedded one by default, whose tokenizer stays as it is",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=ROOT / "checkpoints" / "tiny")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "tiny", help="where intermediate files go")
    parser.add_argument("--steps", type=int, help="default: as scheduled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200, help="held-out cases of each kind in the scores")
    parser.add_argument("--card", action="store_true", help="train nothing: score what was trained, and write its page")
    options = parser.parse_args()
    started = time.perf_counter()
    if not options.card:
        learn(options)
    finish(options.output, options.work, options.cases)
    print(f"done in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    return 0


def learn(options: argparse.Namespace) -> None:
    """Train, write the checkpoint, and what became of the training as history.json and pictures in the work folder."""
    source = empty_source(options.work)
    print("tokenizer and model", flush=True)
    beginning = from_nothing(options.seed) if options.base is None else from_checkpoint(options.base)
    tokenizer, graph, params = beginning.tokenizer, beginning.graph, beginning.params
    config = replace(beginning.schedule, steps=options.steps or beginning.schedule.steps)
    size = sum(leaf.size for leaf in params.values())
    print(f"training {size / 1e6:.2f} million parameters for {config.steps} steps", flush=True)

    def rows_of(kinds: tuple[str, ...], length: int) -> list[Rows]:
        cases = [sample for kind in kinds for sample in held_out_cases(kind, 12, seed=3)]
        documents = [Document(*encode_document(tokenizer, sample)) for sample in cases]
        return [pack_rows([[each] for each in documents if len(each.ids) <= length], length, 0.0)]

    losses, history = partial(row_losses, graph), History()
    rows, tool_rows = rows_of(HELD_OUT, 256), rows_of(HELD_OUT_TOOLS, 512)
    watch, loss_of = make_watch(graph, tokenizer, beginning.watched, WATCH_CASES), make_evaluation(losses)
    tool_loss: list[tuple[int, float]] = []
    if options.base is not None:  # what it begins with belongs into the picture
        history.held_out_loss.append((0, loss_of(params, rows)))
        tool_loss.append((0, loss_of(params, tool_rows)))
        print(f"begins with held-out {history.held_out_loss[0][1]:.3f}, tools {tool_loss[0][1]:.3f}", flush=True)

    def report(speed: float, now: Params) -> None:
        line = f"{history.latest()} {speed:6.0f} tokens/s"
        if options.base is not None:
            tool_loss.append((history.steps, loss_of(now, tool_rows)))
            line += f"  tools {tool_loss[-1][1]:.3f}"
        print(line, flush=True)
        if history.steps % 100 == 0 or history.steps == config.steps:
            print("      " + "  ".join(f"{kind} {share:.0%}" for kind, share in watch(now).items()), flush=True)
            np.savez(options.work / "parameters.npz", **now)  # pyright: ignore[reportArgumentType]

    samples = stream(options.seed, mixture=beginning.mixture)
    packer = Packer(documents_of(tokenizer, samples), partial(pack_rows, prompt_weight=config.prompt_weight))
    params = train(losses, params, batches_of(packer, config), rows, config, history, report)

    print("checkpoint", flush=True)
    curve = {"training": history.training_loss, "held_out": history.held_out_loss}
    curve |= {"held_out_tools": tool_loss} if tool_loss else {}
    facts = RunFacts(size, history.tokens, history.steps, history.seconds)
    stages = [Stage(facts, history.held_out_loss[-1][1], tool_loss[-1][1] if tool_loss else None)]
    if options.base is not None:  # its page goes with the checkpoint that may be written over
        stages = [*read_stages(options.base), *stages]
        for number in range(len(stages) - 1):
            shutil.copyfile(options.base / curve_of(number), options.work / curve_of(number))
    write_stages(options.work, stages)
    draw_curve(curve, options.work / curve_of(len(stages) - 1), counted=f"answers 1, prompts {config.prompt_weight:g}")
    (options.work / "history.json").write_text(json.dumps(curve) + "\n", encoding="utf-8")
    write_checkpoint(module_of(graph, params), beginning.model, tokenizer, source, options.output)


def finish(output: Path, work: Path, cases: int) -> None:
    """Score the checkpoint and write its model card, with the pictures of its trainings."""
    scores, shown = evaluate(output, cases)
    perplexities = perplexity(output, min(cases, 50))
    stages = read_stages(work)
    for number in range(len(stages)):
        shutil.copyfile(work / curve_of(number), output / curve_of(number))
    write_stages(output, stages)
    write_card(output / "README.md", stages, scores, perplexities, shown)


if __name__ == "__main__":
    begin_with_huge_pages()
    sys.exit(main())
