"""Makes the embedded diffusion model from the embedded checkpoint: answers, training, conversion, model card."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxinfer import LLM
from jaxinfer.checkpoint.directory import EMBEDDED_DIFFUSION, read_config
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.models.experts_config import ExpertsConfig
from training.corpus import Sample, stream
from training.denoised import draw, measure
from training.denoising import (
    Lesson,
    lesson_of,
    masked,
    masked_agreements,
    masked_losses,
    noisy_steps,
    pack_lessons,
    with_noise,
)
from training.dense_experts import with_experts
from training.diffusion_card import write_diffusion_card
from training.distillation import held_out_answers, kept_documents, own_documents
from training.huge_pages import begin_with_huge_pages
from training.initialization import CONTEXT, Params
from training.loop import History, TrainingConfig, batches_of, make_evaluation, module_of, train
from training.model_card import RunFacts, draw_curve
from training.options import empty_source, parser_of
from training.packing import Document, Packer
from training.shifting import with_shift
from training.tokenizer import END_OF_TURN, MASK, load_tokenizer, token_ids
from training.writing import write_checkpoint

ARCHITECTURE = "LLaDA2MoeModelLM"
BLOCK_SIZE = 32
COPIES = 3
USUAL_LENGTH = 512
EXPERTS = ExpertsConfig(
    num_experts=8, experts_per_token=3, intermediate_size=24, shared_size=11 * 24, dense_layers=(0,), score="sigmoid",
    has_bias=True, num_groups=4, kept_groups=2,
)  # fmt: skip
DOCUMENTS = 12000
CERTAINTY, UNCERTAIN = 1.0, 0.5
"""Weight of certainty in the end, and the share of the steps before it begins to grow."""
SCHEDULE = TrainingConfig(
    steps=1600,
    decay=0.7,
    matrix_rate=0.005,  # little: what the autoregressive model knows is to stay
    other_rate=1e-3,
    groups=((6, 128), (4, 256), (2, USUAL_LENGTH)),
    long_groups=((4, 128), (2, 256), (2, CONTEXT)),
    long_every=10,
)
CALMING = replace(SCHEDULE, steps=600, decay=0.95, matrix_rate=0.003, other_rate=6e-4)
"""Then certainty counts no more, and probabilities become again what they say."""
SEED = 2  # not that of other checkpoints
HELD_OUT_CASES, HELD_OUT_LENGTH = 48, 512
# Kinds with many right answers: of those the model learns the one that the autoregressive one gives, so that words can
# be found at once. Of others there is one, and it is the corpus's.
FREE = {"plan", "expansion", "expansion_after_plan", "guide", "direct", "small_talk", "dialogue", "long_dialogue"}


def main() -> int:
    parser = parser_of(__doc__, "base", EMBEDDED_DIFFUSION, DOCUMENTS, SCHEDULE.steps)
    parser.add_argument("--cases", type=int, default=50, help="held-out cases of a kind in the measurement")
    parser.add_argument("--card-only", action="store_true", help="measure what is there, and write its card")
    options = parser.parse_args()
    if not options.card_only:
        make(options)
    finish(options.base, options.output, options.work, options.cases)
    return 0


def make(options: argparse.Namespace) -> None:
    """Train and convert."""
    started = time.perf_counter()
    config = replace(SCHEDULE, steps=options.steps)
    calming = replace(CALMING, steps=options.steps * CALMING.steps // SCHEDULE.steps)
    source = empty_source(options.work)

    print("the autoregressive model's answers", flush=True)
    tokenizer = load_tokenizer(options.base)
    ids = token_ids(tokenizer, (END_OF_TURN, MASK))
    as_lesson = partial(fitting_lesson, filler=ids[END_OF_TURN])
    llm = LLM(options.base, max_num_seqs=64)
    answered = own_documents(llm, tokenizer, stream(SEED), temperature_of)
    documents = kept_documents(answered, options.documents, options.work / "documents.json")
    held_out = [as_lesson(document) for document in held_out_answers(llm, HELD_OUT_CASES)]
    del llm
    fitting = [[each] for each in held_out if len(each.ids) <= HELD_OUT_LENGTH]
    clean, rng = pack_lessons(fitting, HELD_OUT_LENGTH), np.random.default_rng(SEED)
    rows = [with_noise(clean, rng, ids[MASK], BLOCK_SIZE)]
    first_round = [masked(clean, np.ones(clean.ids.shape), rng, ids[MASK])]

    base, dense = load_checkpoint(options.base, dtype="float32")
    model, graph, params = with_experts(
        base, dense, EXPERTS, SEED,
        architecture=ARCHITECTURE, block_size=BLOCK_SIZE, mask_token_id=ids[MASK], num_layers=base.num_layers + 1,
    )  # fmt: skip
    params = with_shift(params, model, ids[MASK])
    size = sum(leaf.size for leaf in params.values())
    print(f"training {size / 1e6:.2f} million parameters for {config.steps + calming.steps} steps", flush=True)
    agreement = make_evaluation(partial(masked_agreements, graph, BLOCK_SIZE))
    history = History()

    def report(speed: float, now: Params) -> None:
        print(history.latest(), f"{speed:6.0f} tokens/s  {agreement(now, first_round):.1%} right at once", flush=True)
        if history.steps % 100 == 0:  # a training that was cut off can be looked at
            np.savez(options.work / "parameters.npz", **now)  # pyright: ignore[reportArgumentType]

    packer = Packer(itertools.cycle([as_lesson(document) for document in documents]), pack_lessons)
    losses = partial(masked_losses, graph, BLOCK_SIZE)

    def certainty(step: int) -> float:
        return CERTAINTY * max(0.0, step / config.steps - UNCERTAIN) / (1 - UNCERTAIN)

    for number, (phase, weight) in enumerate(((config, certainty), (calming, lambda step: 0.0))):
        steps = noisy_steps(batches_of(packer, phase), SEED + number, ids[MASK], BLOCK_SIZE, weight)
        params = train(losses, params, steps, rows, phase, history, report, every=100)

    print("checkpoint", flush=True)
    write_checkpoint(module_of(graph, params), model, tokenizer, source, options.output)
    facts = RunFacts(size, history.tokens, history.steps, history.seconds)
    curve = {"training": history.training_loss, "held_out": history.held_out_loss}
    text = json.dumps({"curve": curve, "facts": facts.as_dict()})
    (options.work / "history.json").write_text(text + "\n", encoding="utf-8")
    print(f"made in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)


def temperature_of(number: int, sample: Sample) -> float | None:
    """Greedy answers where there are many right ones; None: the corpus's."""
    return 0.0 if sample.kind in FREE else None


def fitting_lesson(document: Document, filler: int) -> Lesson:
    """A lesson with as many copies as fit into a row of the usual length, and one in any case."""
    for copies in range(COPIES, 1, -1):
        found = lesson_of(document, BLOCK_SIZE, filler, copies)
        if len(found.ids) <= USUAL_LENGTH:
            return found
    return lesson_of(document, BLOCK_SIZE, filler, 1)


def finish(base: Path, output: Path, work: Path, cases: int) -> None:
    """Measure the checkpoint, draw its pictures and write the model card."""
    history = json.loads((work / "history.json").read_text(encoding="utf-8"))
    _, model = read_config(output)
    measured = measure(base, output, cases, partial(print, flush=True))
    draw(measured, output / "rules.png")
    draw_curve(
        history["curve"],
        output / "loss_curve.png",
        "nats per hidden token",
        "those behind hidden ones less",
    )
    facts = RunFacts(**history["facts"])
    write_diffusion_card(output / "README.md", model, facts, history["curve"], measured, cases)


if __name__ == "__main__":
    begin_with_huge_pages()
    sys.exit(main())
