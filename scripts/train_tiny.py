"""Makes the embedded checkpoint from nothing: corpus, tokenizer, training, conversion, scores, model card."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A step allocates and returns a gigabyte; in pages of 4 kB the kernel's part of that is a fifth of the time. glibc
# reads this when a process starts, so the script begins once more with it. Results are the same, bit for bit.
HUGE_PAGES = "glibc.malloc.hugetlb=1"
if __name__ == "__main__" and sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = HUGE_PAGES
    os.execv(sys.executable, [sys.executable, *sys.argv])

import numpy as np  # noqa: E402

from jaxinfer.checkpoint.convert import convert_checkpoint  # noqa: E402
from jaxinfer.checkpoint.export import export_hf  # noqa: E402
from training.corpus import held_out_cases, stream  # noqa: E402
from training.evaluation import evaluate, perplexity  # noqa: E402
from training.initialization import CONTEXT, Params, initial_parameters, model_config  # noqa: E402
from training.loop import History, TrainingConfig, module_of, train  # noqa: E402
from training.model_card import RunFacts, draw_curve, write_card  # noqa: E402
from training.packing import Document, Packer, documents_of, pack_rows  # noqa: E402
from training.tokenizer import (  # noqa: E402
    END_OF_TURN,
    PAD,
    encode_document,
    plain_texts,
    save_tokenizer,
    token_ids,
    train_tokenizer,
)
from training.watch import make_watch  # noqa: E402

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

    print("corpus and tokenizer", flush=True)
    samples = itertools.islice(stream(options.seed), TOKENIZER_SAMPLES)
    tokenizer = train_tokenizer(text for sample in samples for text in plain_texts(sample))
    save_tokenizer(tokenizer, source)

    ids = token_ids(tokenizer, (END_OF_TURN, PAD))
    model = model_config(ids[END_OF_TURN])
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
        (step, loss), (_, held_out_loss) = history.training_loss[-1], history.held_out_loss[-1]
        minutes = (time.perf_counter() - started) / 60
        print(
            f"step {step:5d}/{config.steps}  loss {loss:.3f}  held-out {held_out_loss:.3f}  {speed:6.0f} tokens/s  "
            f"{minutes:.1f} min",
            flush=True,
        )
        if step % 100 == 0 or step == config.steps:
            print("      " + "  ".join(f"{kind} {share:.0%}" for kind, share in watch(now).items()), flush=True)
            np.savez(options.work / "parameters.npz", **now)  # pyright: ignore[reportArgumentType]

    packer = Packer(documents_of(tokenizer, stream(options.seed)), config.prompt_weight)
    params = train(graph, params, packer, rows, config, history, report)

    print("checkpoint", flush=True)
    export_hf(module_of(graph, params), model, source, dtype="bfloat16")
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "eos_token_id": ids[END_OF_TURN],
        "pad_token_id": ids[PAD],
        "max_length": CONTEXT,
    }
    (source / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    curve = {"training": history.training_loss, "held_out": history.held_out_loss}
    facts = RunFacts(size, history.tokens, history.steps, history.seconds)
    (options.work / "history.json").write_text(
        json.dumps({"curve": curve, "facts": facts.as_dict()}) + "\n", encoding="utf-8"
    )
    convert_checkpoint(source, options.output, overwrite=options.output.exists(), progress=False)
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
    sys.exit(main())
