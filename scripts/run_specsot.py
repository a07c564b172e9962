"""Skeleton-of-Thought over branches, as it happens: a plan, its points side by side, the merged answer.

Without a question it answers a held-out one of its task. --compare, --drafting and --memory measure instead: steps and
time of points written at once against one after the other, the same with drafts, and the KV that branches hold.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from branching.drafting import drafting_table, measure_drafting
from branching.expansion import compare, comparison_table, planning_questions, summarise
from branching.growing_answer import answer_live, summary
from branching.kv_memory import measure_memory, memory_table, open_engine
from branching.page_visits import visits_table
from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.environment import describe_environment
from jaxinfer.cli.speculative_options import add_speculative_options, speculative_config
from jaxinfer.limits import BRANCH_MODES
from jaxinfer.skeleton.answer import SkeletonOfThought

LIMITS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
TASKS = {"planning": planning_questions}
WIDTH = 120  # of tables where there is no terminal


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--branch-mode", choices=BRANCH_MODES, default=BRANCH_MODES[0], help="default: %(default)s")
    modes.add_argument(
        "--use_bim_mode", choices=("True", "False"), help="the source's name: True is in_one_sequence, False batching"
    )
    parser.add_argument("--task", choices=TASKS, default="planning", help="whose questions (default: %(default)s)")
    parser.add_argument("--question", metavar="TEXT", help="answer this one")
    parser.add_argument("--model", metavar="PATH", help="checkpoint directory or hub id (default: the embedded one)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="of sampling")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a point at most (default: %(default)s)")
    parser.add_argument("--max-parallel", type=int, metavar="N", help="most points at once (default: all)")
    add_speculative_options(parser, default_draft_model="the embedded one")
    parser.add_argument("--timeline", type=Path, metavar="PNG", help="draw which branch decoded in which step")
    parser.add_argument("--compare", type=int, nargs="?", const=12, metavar="N", help="over N questions (default: 12)")
    parser.add_argument(
        "--drafting", type=int, nargs="?", const=6, metavar="N",
        help="plain decoding, chains and trees of the embedded head over N questions (default: 6)",
    )  # fmt: skip
    parser.add_argument("--pairs", type=int, default=3, help="turns that count (default: %(default)s)")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="count the KV of 1 to 16 branches, and the pages that the attention kernel loads for them",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures of what is measured here")
    options = parser.parse_args()
    if options.use_bim_mode is not None:
        options.branch_mode = "in_one_sequence" if options.use_bim_mode == "True" else "batching"
    try:
        options.speculative_config = speculative_config(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def answer(console: Console, options: argparse.Namespace) -> None:
    """One question, shown as it is answered."""
    question = options.question or next(TASKS[options.task](1))
    llm = LLM(options.model, **LIMITS, speculative_config=options.speculative_config)
    params = SamplingParams(temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens)
    output, events = answer_live(
        console, SkeletonOfThought(llm.client), question, params, branch_mode=options.branch_mode,
        max_parallel_branches=options.max_parallel,
    )  # fmt: skip
    console.out(output.text, "", sep="\n", highlight=False)
    console.print(summary(output))
    if options.timeline is not None:
        # Only here, because matplotlib is no part of what runs the engine.
        from branching.timeline import draw_timeline

        draw_timeline(output, events, options.timeline)


def compare_plans(console: Console, options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The figures of --compare, and whether all tokens are the same."""
    llm = LLM(options.model, **LIMITS, speculative_config=options.speculative_config)
    console.print("compiling and measuring ...")
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    questions = TASKS[options.task](options.compare)
    rows = list(compare(llm, SkeletonOfThought(llm.client), questions, options.compare, params, options.pairs))
    console.print(comparison_table(rows))
    modes = summarise(rows)
    return {"modes": modes, "questions": rows}, all(found["same_tokens"] == len(rows) for found in modes.values())


def main() -> None:
    options = parse_options()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if options.compare is None and options.drafting is None and not options.memory:
        answer(console, options)
        return
    report: dict[str, Any] = {"environment": describe_environment(), "speculative": options.speculative_config}
    same = True
    if options.compare is not None:
        report["expansion"], same = compare_plans(console, options)
    if options.drafting is not None:
        console.print("compiling and measuring ...")
        questions = TASKS[options.task](options.drafting)
        report["drafting"] = rows = measure_drafting(LIMITS, questions, options.drafting, options.pairs)
        console.print(drafting_table(rows))
        same &= all(row["same"] == row["questions"] for row in rows)
    if options.memory:
        report["memory"] = measure_memory(open_engine(options.model))
        console.print(memory_table(report["memory"]))
        console.print(visits_table())
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not same:
        raise SystemExit("texts differ between ways to write them")


if __name__ == "__main__":
    main()
