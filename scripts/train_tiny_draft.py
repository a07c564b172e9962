"""Make the embedded draft model from the embedded target: its answers, distillation, conversion, model card."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import replace
from functools import partial

from jaxinfer import LLM
from jaxinfer.checkpoint.directory import EMBEDDED_DRAFT
from jaxinfer.checkpoint.load import load_checkpoint
from training.acceptance import CASES, measure
from training.corpus import mixture_of, stream
from training.distillation import (
    agreements,
    divergences,
    first_layers,
    held_out_answers,
    kept_documents,
    make_teacher,
    own_documents,
    repeated,
)
from training.draft_card import write_draft_card
from training.huge_pages import begin_with_huge_pages
from training.initialization import CONTEXT, Params
from training.loop import History, TrainingConfig, batches_of, make_evaluation, module_of, train
from training.model_card import RunFacts, draw_curve
from training.options import empty_source, parser_of
from training.packing import Packer, Rows, pack_rows
from training.tokenizer import load_tokenizer
from training.tool_format import knows_tools
from training.writing import write_checkpoint

LAYERS = 2
DOCUMENTS = 8000
STEPS = 720
# The draft model begins as part of a trained one: smaller steps than from nothing, and a longer way down.
SCHEDULE = TrainingConfig(
    steps=STEPS,
    decay=0.8,
    other_rate=2e-3,
    groups=((4, 128), (2, 256), (1, 512)),
    long_groups=((2, 128), (2, 256), (1, CONTEXT)),
)
SEED = 1  # not the target's, so that it does not answer what it was trained on
HELD_OUT_CASES, HELD_OUT_LENGTH = 100, 512


def main() -> int:
    parser = parser_of(__doc__, "target", EMBEDDED_DRAFT, DOCUMENTS, STEPS)
    parser.add_argument("--cases", type=int, default=CASES, help="held-out prompts in the measurement")
    options = parser.parse_args()
    started = time.perf_counter()
    config = replace(SCHEDULE, steps=options.steps)
    source = empty_source(options.work)

    print("the target's answers", flush=True)
    tokenizer = load_tokenizer(options.target)
    llm = LLM(options.target, max_num_seqs=64)
    mixture = mixture_of(knows_tools(tokenizer.chat_template))
    answered = own_documents(llm, tokenizer, stream(SEED, mixture=mixture))
    documents = kept_documents(answered, options.documents, options.work / "documents.json")
    held_out = held_out_answers(llm, HELD_OUT_CASES)
    del llm
    target, teacher = load_checkpoint(options.target, dtype="float32")
    teach = make_teacher(teacher)
    packer = Packer(itertools.cycle(documents), partial(pack_rows, prompt_weight=config.prompt_weight))
    size, step_size = sum(len(each.ids) for each in documents), sum(rows * length for rows, length in config.groups)
    steps = itertools.islice(batches_of(packer, config), size // step_size)
    lessons: list[list[Rows]] = [list(map(teach, groups)) for groups in steps]
    fitting = [[each] for each in held_out if len(each.ids) <= HELD_OUT_LENGTH]
    rows: list[Rows] = [teach(pack_rows(fitting, HELD_OUT_LENGTH, 0.0))]

    words = teacher.embed.embedding[...]
    model, graph, params = first_layers(target, teacher, LAYERS)
    size = sum(leaf.size for leaf in params.values())
    print(f"training {size / 1e6:.2f} million parameters for {config.steps} steps", flush=True)
    agreement = make_evaluation(partial(agreements, graph, words))
    history = History()

    def report(speed: float, now: Params) -> None:
        print(history.latest(), f"{speed:6.0f} tokens/s  {agreement(now, rows):.1%} right", flush=True)

    params = train(partial(divergences, graph, words), params, repeated(lessons, SEED), rows, config, history, report)

    print("checkpoint", flush=True)
    write_checkpoint(module_of(graph, params), model, tokenizer, source, options.output)
    curve = {"training": history.training_loss, "held_out": history.held_out_loss}
    draw_curve(curve, options.output / "loss_curve.png", "nats per token from the target")
    facts = RunFacts(size, history.tokens, history.steps, history.seconds)
    figures = measure(options.target, options.output, options.cases)
    write_draft_card(options.output / "README.md", model, facts, curve, figures, options.cases)
    print(f"done in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    return 0


if __name__ == "__main__":
    begin_with_huge_pages()
    sys.exit(main())
