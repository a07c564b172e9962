"""Make the embedded checkpoint from nothing: corpus, tokenizer, training, conversion, scores, model card."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from training.corpus import held_out_cases, stream
from training.evaluation import evaluate, perplexity
from training.huge_pages import begin_with_huge_pages
from training.initialization import Params, initial_parameters, model_config
from training.loop import History, TrainingConfig, batches_of, module_of, row_losses, train
from training.model_card import RunFacts, draw_curve, write_card
from training.packing import Document, Packer, documents_of, pack_rows
from training.tokenizer import END_OF_TURN, encode_document, plain_texts, token_ids, train_tokenizer
from training.watch import make_watch
from training.writing import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER_SAMPLES = 20_000
WATCH_CASES = 40
HELD_OUT_LENGTH = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "checkpoints" / "tiny")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "tiny", help="where intermediate files go")
    parser.add_argument("--steps", type=int, default=TrainingConfig.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200, help="held-out cases of each kind in the scores")
    options = parser.parse_args()
    started = time.perf_counter()
    config = TrainingConfig(steps=options.steps)
    source = options.work / "huggingface"
    if source.exists():
        shutil.rmtree(source)
    options.work.mkdir(parents=True, exist_ok=True)

    print("corpus and tokenizer", flush=True)
    samples = itertools.islice(stream(options.seed), TOKENIZER_SAMPLES)
    tokenizer = train_tokenizer(text for sample in samples for text in plain_texts(sample))

    model = model_config(token_ids(tokenizer, (END_OF_TURN,))[END_OF_TURN])
    graph, params = initial_parameters(model, options.seed)
    size = sum(leaf.size for leaf in params.values())
    print(f"training {size / 1e6:.2f} million parameters for {config.steps} steps", flush=True)
    watched = ("plan", "expansion", "reading", "world", "to_json")
    cases = [sample for kind in watched for sample in held_out_cases(kind, 12, seed=3)]
    held_out = [Document(*encode_document(tokenizer, sample)) for sample in cases]
    rows = [pack_rows([[document] for document in held_out], HELD_OUT_LENGTH, 0.0)]
    watch = make_watch(graph, tokenizer, WATCH_CASES)
    history = History()

    def report(speed: float, now: Params) -> None:
        print(history.latest(), f"{speed:6.0f} tokens/s", flush=True)
        if history.steps % 100 == 0 or history.steps == config.steps:
            print("      " + "  ".join(f"{kind} {share:.0%}" for kind, share in watch(now).items()), flush=True)
            np.savez(options.work / "parameters.npz", **now)  # pyright: ignore[reportArgumentType]

    packer = Packer(
        documents_of(tokenizer, stream(options.seed)), partial(pack_rows, prompt_weight=config.prompt_weight)
    )
    losses = partial(row_losses, graph)
    params = train(losses, params, batches_of(packer, config), rows, config, history, report)

    print("checkpoint", flush=True)
    curve = {"training": history.training_loss, "held_out": history.held_out_loss}
    facts = RunFacts(size, history.tokens, history.steps, history.seconds)
    (options.work / "history.json").write_text(
        json.dumps({"curve": curve, "facts": facts.as_dict()}) + "\n", encoding="utf-8"
    )
    write_checkpoint(module_of(graph, params), model, tokenizer, source, options.output)
    finish(options.output, options.work, options.cases)
    print(f"done in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    return 0


def finish(output: Path, work: Path, cases: int) -> None:
    """Score the checkpoint, draw the loss curve and write the model card."""
    history = json.loads((work / "history.json").read_text(encoding="utf-8"))
    scores, shown = evaluate(output, cases)
    everything, answers = perplexity(output, min(cases, 50))
    draw_curve(history["curve"], output / "loss_curve.png")
    write_card(
        output / "README.md", RunFacts(**history["facts"]), history["curve"], scores, (everything, answers), shown
    )


if __name__ == "__main__":
    begin_with_huge_pages()
    sys.exit(main())
