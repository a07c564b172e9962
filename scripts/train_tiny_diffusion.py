"""Make the embedded diffusion model from the embedded checkpoint: answers, training, conversion, model card.

First it learns to write `tiny`'s answers in blocks; then deterministic answers, so that more of a block is committed at
once; then the masks that its own rounds leave, at last with more weight on confident mistakes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxinfer import LLM
from jaxinfer.checkpoint.directory import EMBEDDED_DIFFUSION, read_config
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts_config import ExpertsConfig
from training.corpus import Sample, stream
from training.denoised import draw, measure, read_figures
from training.denoising import (
    USUAL_NOISE,
    Lesson,
    MaskWeights,
    Noise,
    lesson_of,
    masked,
    masked_agreements,
    masked_losses,
    noisy_steps,
    own_losses,
    pack_lessons,
    with_noise,
)
from training.dense_experts import with_experts
from training.diffusion_card import write_diffusion_card
from training.distillation import HELD_OUT_SEED, held_out_answers, kept_documents, own_documents
from training.huge_pages import begin_with_huge_pages
from training.initialization import CONTEXT, Params
from training.loop import History, TrainingConfig, batches_of, make_evaluation, module_of, train
from training.model_card import RunFacts, draw_curve
from training.options import empty_source, parser_of
from training.packing import Document, Packer, documents_of
from training.settled import settled_stream
from training.shifting import with_shift
from training.tokenizer import END_OF_TURN, MASK, load_tokenizer, token_ids
from training.varied import varied_stream
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
UNCERTAIN = 0.5
"""Share of the steps of a phase before certainty begins to count."""


@dataclass(frozen=True)
class Phase:
    """A schedule, the weight of certainty in its end, what is masked, and how much more a wrong word counts after the
    model's own rounds, the more the surer it is said."""

    schedule: TrainingConfig
    certainty: float = 0.0
    noise: Noise = USUAL_NOISE
    doubt: float = 0.0


@dataclass(frozen=True)
class DiffusionModel:
    """A model in training."""

    config: ModelConfig
    graph: nnx.GraphDef
    params: Params


_ANSWERS = TrainingConfig(
    steps=1600,
    decay=0.7,
    matrix_rate=0.005,  # little: what the autoregressive model knows is to stay
    other_rate=1e-3,
    groups=((6, 128), (4, 256), (2, USUAL_LENGTH)),
    long_groups=((4, 128), (2, 256), (2, CONTEXT)),
    long_every=10,
)
# Then certainty counts no more, and probabilities become again what they say.
_CALMING = replace(_ANSWERS, steps=600, decay=0.95, matrix_rate=0.003, other_rate=6e-4)
LEARNING = (Phase(_ANSWERS, certainty=1.0), Phase(_CALMING))
# Where nothing is left to chance, more can be known far ahead. Answers are longer: so are rows.
_SETTLED = replace(
    _ANSWERS,
    steps=900,
    decay=0.002,  # none: the next part continues from here
    matrix_rate=0.006,
    groups=((2, 256), (5, USUAL_LENGTH)),
    long_groups=((2, 256), (5, USUAL_LENGTH)),
)
SETTLING = (Phase(_SETTLED, noise=Noise(MaskWeights(0.92, 0.2))),)
# Then with what its own rounds leave hidden: names of several tokens, mostly.
_OWN = replace(_SETTLED, steps=1600, decay=0.9, matrix_rate=0.005)
OWN = (Phase(_OWN, noise=replace(SETTLING[0].noise, is_own=True)),)
# Then the same with doubt, so that fewer of the words are wrong of which it is sure.
_DOUBTING = replace(_SETTLED, steps=500, decay=0.85, matrix_rate=0.003, other_rate=6e-4)
DOUBTING = (replace(OWN[0], schedule=_DOUBTING, doubt=4.0),)
# Last, with more of it, and more often from where most is said wrongly: blocks that are hidden wholly.
_WHOLE = replace(_OWN, steps=1500)
_LAST = replace(_WHOLE, steps=360, matrix_rate=0.003)
_WHOLE_NOISE = replace(OWN[0].noise, wholly=0.5, end=0.2)
WHOLE = tuple(Phase(schedule, noise=_WHOLE_NOISE, doubt=8.0) for schedule in (_WHOLE, _LAST))
PARTS = ("answers", "settled", "own", "doubting", "whole")
SEED = 2  # not that of other checkpoints
HELD_OUT_CASES, HELD_OUT_LENGTH = 48, 512
# Kinds with many right answers: of those the model learns the one that the autoregressive one gives, so that words can
# be found at once. Of others there is one, and it is the corpus's.
FREE = {"plan", "expansion", "expansion_after_plan", "guide", "direct", "small_talk", "dialogue", "long_dialogue"}


def main() -> int:
    parser = parser_of(__doc__, "base", EMBEDDED_DIFFUSION, DOCUMENTS)
    parser.add_argument("--part", type=float, default=1.0, help="of the steps that are scheduled, to try things")
    parser.add_argument("--cases", type=int, default=50, help="held-out cases of a kind in the measurement")
    parser.add_argument("--figures", type=Path, help="what measure_denoising.py has written, for the card")
    parser.add_argument("--begin", choices=(*PARTS, "card"), default=PARTS[0], help="leave out what comes before this")
    options = parser.parse_args()
    ways = (
        learn_answers,
        partial(learn_settled, SETTLING, SEED),
        partial(learn_settled, OWN, SEED + 10),
        partial(learn_settled, DOUBTING, SEED + 20),
        partial(learn_settled, WHOLE, SEED + 30),
    )
    is_left_out = True
    for name, way in zip(PARTS, ways, strict=True):
        is_left_out = is_left_out and name != options.begin
        if not is_left_out:
            history = way(options)
            (options.work / f"{name}.json").write_text(json.dumps(history) + "\n", encoding="utf-8")
    finish(options)
    return 0


def learn_answers(options: argparse.Namespace) -> dict[str, Any]:
    """Train what begins as the autoregressive model on its answers, and write the checkpoint."""
    print("the autoregressive model's answers", flush=True)
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.base)
    llm = LLM(options.base, max_num_seqs=64)
    answered = own_documents(llm, tokenizer, stream(SEED), temperature_of)
    documents = kept_documents(answered, options.documents, options.work / "documents.json")
    held_out = held_out_answers(llm, HELD_OUT_CASES)
    del llm

    mask = token_ids(tokenizer, (MASK,))[MASK]
    base, dense = load_checkpoint(options.base, dtype="float32")
    config, graph, params = with_experts(
        base, dense, EXPERTS, SEED,
        architecture=ARCHITECTURE, block_size=BLOCK_SIZE, mask_token_id=mask, num_layers=base.num_layers + 1,
    )  # fmt: skip
    model = DiffusionModel(config, graph, with_shift(params, config, mask))
    return learn(options, model, itertools.cycle(documents), held_out, LEARNING, SEED)


def learn_settled(phases: tuple[Phase, ...], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train the checkpoint on answers in which nothing is left to chance, half of them with names and things that it
    can only copy, and write it again."""
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.base)
    config, module = load_checkpoint(options.output, dtype="float32")
    graph, state = nnx.split(module)
    params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    held_out = documents_of(tokenizer, settled_stream(HELD_OUT_SEED, held_out=True))
    model = DiffusionModel(config, graph, params)
    documents = documents_of(tokenizer, varied_stream(seed))
    return learn(options, model, documents, list(itertools.islice(held_out, HELD_OUT_CASES)), phases, seed)


def learn(
    options: argparse.Namespace,
    model: DiffusionModel,
    documents: Iterator[Document],
    held_out: list[Document],
    phases: tuple[Phase, ...],
    seed: int,
) -> dict[str, Any]:
    """Train through the phases and write the checkpoint. Gives what it took, as `facts`, and the `curve`."""
    started = time.perf_counter()
    source, tokenizer = empty_source(options.work), load_tokenizer(options.base)
    ids = token_ids(tokenizer, (END_OF_TURN, MASK))
    as_lesson = partial(fitting_lesson, filler=ids[END_OF_TURN])
    fitting = [[lesson] for lesson in map(as_lesson, held_out) if len(lesson.ids) <= HELD_OUT_LENGTH]
    clean, rng = pack_lessons(fitting, HELD_OUT_LENGTH), np.random.default_rng(SEED)
    rows = [with_noise(clean, rng, ids[MASK], BLOCK_SIZE)]
    first_round = [masked(clean, np.ones(clean.ids.shape), rng, ids[MASK])]

    params, graph = model.params, model.graph
    size = sum(leaf.size for leaf in params.values())
    scheduled = [replace(phase.schedule, steps=int(phase.schedule.steps * options.part)) for phase in phases]
    print(f"training {size / 1e6:.2f} million parameters for {sum(each.steps for each in scheduled)} steps", flush=True)
    agreement = make_evaluation(partial(masked_agreements, graph, BLOCK_SIZE))
    history = History()

    def report(speed: float, now: Params) -> None:
        print(history.latest(), f"{speed:6.0f} tokens/s  {agreement(now, first_round):.1%} right at once", flush=True)
        if history.steps % 100 == 0:  # a training that was cut off can be looked at
            np.savez(options.work / "parameters.npz", **now)  # pyright: ignore[reportArgumentType]

    packer = Packer(map(as_lesson, documents), pack_lessons)
    for number, (phase, schedule) in enumerate(zip(phases, scheduled, strict=True)):

        def certainty(step: int, most: float = phase.certainty, steps: int = schedule.steps) -> float:
            return most * max(0.0, step / steps - UNCERTAIN) / (1 - UNCERTAIN)

        batches = batches_of(packer, schedule)
        steps = noisy_steps(batches, seed + number, ids[MASK], BLOCK_SIZE, certainty, phase.noise)
        losses = partial(masked_losses, graph, BLOCK_SIZE)
        if phase.noise.is_own:
            losses = partial(own_losses, graph, BLOCK_SIZE, ids[MASK], phase.noise.weights, phase.doubt)
        params = train(losses, params, steps, rows, schedule, history, report, every=100)

    print("checkpoint", flush=True)
    write_checkpoint(module_of(graph, params), model.config, tokenizer, source, options.output)
    facts = RunFacts(size, history.tokens, history.steps, history.seconds)
    curve = {"training": history.training_loss, "held_out": history.held_out_loss}
    print(f"made in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    return {"curve": curve, "facts": facts.as_dict()}


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


def finish(options: argparse.Namespace) -> None:
    """Measure the checkpoint unless `--figures` has its figures, draw its pictures and write the model card."""
    output = options.output
    parts = [json.loads((options.work / f"{name}.json").read_text(encoding="utf-8")) for name in PARTS]
    facts, own = [RunFacts(**part["facts"]) for part in parts], parts[PARTS.index("own")]
    _, model = read_config(output)
    if options.figures is not None:
        measured = read_figures(options.figures)
    else:
        measured = measure(options.base, output, options.cases, partial(print, flush=True))
    draw(measured, output / "rules.png")
    draw_curve(
        own["curve"],
        output / "loss_curve.png",
        "nats per hidden token",
        "what it is sure of shown, in two thirds",
    )
    last_loss = own["curve"]["held_out"][-1][1]
    write_diffusion_card(output / "README.md", model, facts, last_loss, measured)


if __name__ == "__main__":
    begin_with_huge_pages()
    sys.exit(main())
