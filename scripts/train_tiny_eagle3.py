"""Make an EAGLE-3 head for a target, the embedded one by default: its answers, unrolled training, conversion, card."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxinfer import LLM
from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.checkpoint.directory import EMBEDDED_EAGLE3, embedded_checkpoint
from jaxinfer.checkpoint.eagle3 import load_head
from jaxinfer.checkpoint.export import export_head
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3_config import Eagle3Config, captured_layers
from jaxinfer.models.rope import RopeConfig
from training.corpus import TOOLS, mixture_of, stream
from training.distillation import kept_documents, own_documents, repeated
from training.head_acceptance import DRAFTED, Chains, make_right
from training.head_answers import HeldOut, held_out_texts, prompted_documents, read_prompts
from training.head_card import HeadFacts, write_head_card
from training.head_initialization import fit_guess, initial_head
from training.head_lessons import draft_words, feature_size, make_head_teacher, output_table, with_projection_scaled
from training.huge_pages import begin_with_huge_pages
from training.initialization import CONTEXT, Params
from training.loop import History, TrainingConfig, batches_of, train
from training.model_card import RunFacts, draw_curve
from training.options import empty_source, parser_of
from training.packing import Document, Packer, Rows, pack_rows
from training.tokenizer import load_tokenizer
from training.tool_format import knows_tools
from training.unrolled import HeadRows, head_of, split_head, unrolled_losses

DOCUMENTS = 8000
SCHEDULE = TrainingConfig(
    steps=1500,
    decay=0.7,
    other_rate=2e-3,
    weight_decay=0.0,
    prompt_weight=0.0,
    optimizer="adamw",
    groups=((4, 128), (2, 256), (1, 512)),
    long_groups=((2, 128), (2, 256), (1, CONTEXT)),
)
PHASES = ((1, 0.2), (3, 0.25), (7, 0.55))
"""Drafted tokens of each start, and the share of the training's steps: a head that drafts one well learns fast to
continue from it, and one token costs a quarter of seven."""
INTERMEDIATE = 2
"""Times the hidden size."""
WORDS = (1024, 1536)
"""Sizes of the draft vocabulary to choose from."""
Teach = Callable[[Rows, int], HeadRows]
SEED = 2  # neither the target's nor the draft model's
CASES, HELD_OUT_LENGTH, TOGETHER = 300, 512, 25
FITTED = 40
"""Steps' lessons that the initial head is fitted to."""


def main() -> int:
    parser = parser_of(__doc__, "target", EMBEDDED_EAGLE3, DOCUMENTS, SCHEDULE.steps)
    parser.add_argument(
        "--prompts", type=Path,
        help="what the target answers: JSON lines, each a list of messages; needed for any target but the embedded one",
    )  # fmt: skip
    parser.add_argument("--words", type=int, nargs="+", default=WORDS, help="sizes of the draft vocabulary")
    parser.add_argument("--cases", type=int, default=CASES, help="held-out prompts in the measurement")
    options = parser.parse_args()
    started = time.perf_counter()
    source = empty_source(options.work)

    print("the target's answers", flush=True)
    documents, held_out = texts(options)
    of_target, target = load_checkpoint(options.target, dtype="float32")
    words, coverage = draft_words(documents, of_target.vocab_size, options.words)
    head_config = configuration(of_target, len(words))
    make_teacher = partial(make_head_teacher, target, head_config.capture, words, np.random.default_rng(SEED))
    some = pack_rows([[each] for each in held_out.documents[:TOGETHER]], HELD_OUT_LENGTH, 0.0)
    feature = feature_size(make_teacher()(some, 1))
    teach = make_teacher(feature)
    lessons = lessons_of(documents, teach)
    batches = held_out_batches(held_out, teach)

    table, output = target.embed.embedding[...], output_table(target)
    guess = fit_guess(target, itertools.chain.from_iterable(lessons[:FITTED]))
    graph, rest, params = split_head(initial_head(head_config, target, words, guess, SEED))
    size = sum(leaf.size for leaf in params.values())
    print(f"{len(words)} words cover {coverage:.2%} of what is written", flush=True)
    print(f"training {size / 1e6:.2f} million parameters for {options.steps} steps", flush=True)
    history, right = History(), make_right(table)

    def report(speed: float, now: Params) -> None:
        chains = Chains.along(right(head_of(graph, rest, now), batches[:1]), DRAFTED)
        print(history.latest(), f"{speed:6.0f} tokens/s  {chains.accepted_length:.2f} tokens a round", flush=True)

    first: list[Rows] = [batches[0]]
    again = repeated([list[Rows](groups) for groups in lessons], SEED)
    for unrolled, share in PHASES:
        print(f"{unrolled} drafted", flush=True)
        losses = partial(unrolled_losses, graph, rest, table, output, unrolled)
        phase = replace(SCHEDULE, steps=round(share * options.steps))
        params = train(losses, params, again, first, phase, history, report)

    print("checkpoint", flush=True)
    trained = with_projection_scaled(head_of(graph, rest, params), 1 / feature)
    export_head(trained, source, dtype="bfloat16")
    convert_checkpoint(source, options.output, overwrite=options.output.exists(), progress=False)
    head = load_head(options.output, of_target, dtype="float32")
    found = right(with_projection_scaled(head, feature), batches)
    curve = {"training": history.training_loss, "held_out": history.held_out_loss}
    draw_curve(curve, options.output / "loss_curve.png", "nats per draft from the target", "answers alone")
    run = RunFacts(size, history.tokens, history.steps, history.seconds)
    plain = [each for each, kind in zip(found, held_out.kinds, strict=True) if kind not in TOOLS]
    facts = HeadFacts(run, coverage, PHASES, history.steps / len(lessons), len(plain))
    by_kind = {
        kind: Chains.along([found[i] for i, of in enumerate(held_out.kinds) if of == kind], DRAFTED)
        for kind in sorted(set(held_out.kinds))
    }
    whole = Chains.along(plain, DRAFTED)
    write_head_card(options.output / "README.md", head.config, facts, curve, whole, by_kind)
    print(f"{whole.accepted_length:.2f} tokens a round; right at each depth: {whole.shares}", flush=True)
    print(f"done in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    return 0


def texts(options: argparse.Namespace) -> tuple[list[Document], HeldOut]:
    """The texts to learn from, and held-out ones in which the target's greedy answers count."""
    llm = LLM(options.target, max_num_seqs=64)
    if options.prompts is None:
        if options.target.resolve() != embedded_checkpoint().resolve():
            raise SystemExit("--prompts is needed: the corpus is that of the embedded target")
        tokenizer = load_tokenizer(options.target)
        has_tools = knows_tools(tokenizer.chat_template)
        answered = own_documents(llm, tokenizer, stream(SEED, mixture=mixture_of(has_tools)))
        documents = kept_documents(answered, options.documents, options.work / "documents.json")
        return documents, held_out_texts(llm, options.cases, HELD_OUT_LENGTH, has_tools)
    return prompted_documents(llm, read_prompts(options.prompts)[: options.documents], options.cases, HELD_OUT_LENGTH)


def configuration(target: ModelConfig, words: int) -> Eagle3Config:
    """A head as wide as its target, with the target's attention heads, Llama's layer and rope of its own."""
    positions = target.max_position_embeddings
    layer = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=INTERMEDIATE * target.hidden_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(max_position_embeddings=positions, original_max_position_embeddings=positions),
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )
    return Eagle3Config(layer, words, target.hidden_size, captured_layers({}, target.num_layers))


def lessons_of(documents: Sequence[Document], teach: Teach) -> list[list[HeadRows]]:
    """The groups of rows of each step that the texts give, once."""
    packer = Packer(itertools.cycle(documents), partial(pack_rows, prompt_weight=SCHEDULE.prompt_weight))
    size, step_size = sum(len(each.ids) for each in documents), sum(rows * length for rows, length in SCHEDULE.groups)
    steps = itertools.islice(batches_of(packer, SCHEDULE), size // step_size)
    return [[teach(rows, rows.ids.shape[1] // 2) for rows in groups] for groups in steps]


def held_out_batches(held_out: HeldOut, teach: Teach) -> list[HeadRows]:
    """Rows of one text each, a few together, whose starts are all tokens that are drafted."""
    most = max(sum(each.written) for each in held_out.documents)
    return [
        teach(pack_rows([[each] for each in some], HELD_OUT_LENGTH, 0.0), most)
        for some in itertools.batched(held_out.documents, TOGETHER)
    ]


if __name__ == "__main__":
    begin_with_huge_pages()
    sys.exit(main())
