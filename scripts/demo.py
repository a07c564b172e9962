"""Stream the answers to prompts of all kinds at once from the embedded checkpoint, side by side; then show what speeds
answers up: all points of one answer at the same time, and a draft model."""

from __future__ import annotations

import time

START = time.perf_counter()  # imports count: they are the first thing that a newcomer waits for

import argparse
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from branching.growing_answer import answer_live, summary_line
from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.skeleton.answer import SkeletonOfThought
from terminal.panes import REFRESHES_PER_SECOND, Pane, side_by_side

PLAN_PROTOCOL = "Answer with [PLAN] and a list of points, or with [DIRECT] and one short answer."

# In the words that the embedded checkpoint was trained on; its training did not see these combinations of task and
# object nor these names. How often it is right is in its model card.
PROMPTS: dict[str, list[dict[str, str]]] = {
    "chat": [
        {"role": "user", "content": "Are you a robot?"},
        {"role": "assistant", "content": "I am a small language model and not a person."},
        {"role": "user", "content": "That was my mistake."},
        {"role": "assistant", "content": "That is all right."},
        {"role": "user", "content": "What can you do?"},
    ],
    "its small world": [{"role": "user", "content": "Who works in the library?"}],
    "plan": [
        {"role": "system", "content": PLAN_PROTOCOL},
        {"role": "user", "content": "I am Mustis. Make a plan with five points: repair a ladder."},
    ],
    "one point of a plan": [
        {
            "role": "user",
            "content": "Task: train a parrot\nPlan:\n1. Win its trust\n2. Train in short lessons\n"
            "3. Work in new places\nWrite point 2: Train in short lessons (about 20 tokens).",
        }
    ],
    "guide": [{"role": "user", "content": "Write a guide with three points: build a drum."}],
    "reading": [
        {
            "role": "user",
            "content": "Read the text and answer the question.\nText: The ship Votan sails to Mestad. The captain of "
            "Votan is Broseban. The cargo of Votan is stones. The ship Vagatru sails to Lagroburg. The captain of "
            "Vagatru is Mofigre. The cargo of Vagatru is coins.\nQuestion: Who is the captain of Vagatru?",
        }
    ],
    "JSON": [
        {
            "role": "user",
            "content": "Write this as JSON: Festigi is 26 years old, works as a teacher and lives in Kludadale.",
        }
    ],
    "no plan needed": [
        {"role": "system", "content": PLAN_PROTOCOL},
        {"role": "user", "content": "Wick, who is the doctor?"},
    ],
}
QUESTION_FOR_BRANCHES = "Make a plan with five points: repair a bicycle."
RUNS = 2  # of each way of decoding, after one that compiles


def pane_of(title: str, messages: Sequence[dict[str, str]]) -> Pane:
    """What shows an answer: under what it answers, which is every turn with its speaker if there are several."""
    turns = [message for message in messages if message["role"] != "system"]
    heading = turns[0]["content"] if len(turns) == 1 else "\n".join(f"{t['role']}: {t['content']}" for t in turns)
    return Pane(title, heading)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer (default: %(default)s)")
    args = parser.parse_args()

    console = Console()
    console.print("Loading the embedded model. Programs are compiled when they are first needed, and kept on disk.\n")
    llm = LLM()
    loaded = time.perf_counter()
    panes = [pane_of(title, messages) for title, messages in PROMPTS.items()]
    prompts = list(PROMPTS.values())
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    deltas = Timed(llm.stream(prompts, params))
    if console.is_terminal:
        stream_side_by_side(console, panes, deltas)
    else:
        print_in_turn(panes, deltas)
    end = time.perf_counter()
    assert deltas.first is not None
    console.print(summary(llm, len(panes), loaded - START, deltas.first - START, end - START))
    console.print("\nSkeleton-of-Thought: a plan, then all of its points at once\n")
    output, _ = answer_live(console, SkeletonOfThought(llm.client), QUESTION_FOR_BRANCHES, params)
    console.print(summary_line(output))
    console.print("\nThe same prompts with a draft model. A second engine compiles its programs.\n")
    console.print(comparison(llm, prompts, params))


class Timed:
    """Outputs of a stream, and when the first one came, in seconds of `time.perf_counter`."""

    def __init__(self, outputs: Iterable[RequestOutput]) -> None:
        self._outputs = outputs
        self.first: float | None = None

    def __iter__(self) -> Iterator[RequestOutput]:
        for output in self._outputs:
            self.first = self.first or time.perf_counter()
            yield output


def receive(panes: Sequence[Pane], output: RequestOutput) -> None:
    """Add the new text of one request to its pane: request ids count up in the order of the prompts."""
    pane = panes[int(output.request_id)]
    pane.text += output.outputs[0].text
    pane.finished = output.finished


def stream_side_by_side(console: Console, panes: Sequence[Pane], deltas: Iterable[RequestOutput]) -> None:
    """Show all answers growing at once; when all are done, leave them on the screen in full."""
    with Live(console=console, transient=True, refresh_per_second=REFRESHES_PER_SECOND) as live:
        for output in deltas:
            receive(panes, output)
            live.update(side_by_side(console, panes, height=console.height - 1))
    console.print(side_by_side(console, panes))


def print_in_turn(panes: Sequence[Pane], deltas: Iterable[RequestOutput]) -> None:
    """Print every answer once it is complete and those before it are printed."""
    printed = 0
    for output in deltas:
        receive(panes, output)
        while printed < len(panes) and panes[printed].finished:
            pane = panes[printed]
            print(f"=== {pane.title}\n{pane.heading}\n---\n{pane.text}\n", flush=True)
            printed += 1


def summary(llm: LLM, num_prompts: int, load_seconds: float, first_seconds: float, seconds: float) -> Table:
    """Return what the engine did, in one short table; seconds count from the start."""
    metrics = llm.get_metrics()
    table = Table(title=f"{num_prompts} prompts, one batch", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in (
        ("prompt tokens", f"{metrics.prompt_tokens_total}"),
        ("output tokens", f"{metrics.generation_tokens_total}"),
        ("steps", f"{metrics.num_steps_total}"),
        ("average batch (rows per step)", f"{metrics.average_batch:.2f}"),
        ("programs compiled or loaded", f"{metrics.num_compiles_total}"),
        ("seconds until loaded", f"{load_seconds:.1f}"),
        ("seconds until the first text", f"{first_seconds:.1f}"),
        ("seconds until all answers", f"{seconds:.1f}"),
    ):
        table.add_row(name, value)
    return table


def comparison(plain: LLM, prompts: list[list[dict[str, str]]], params: SamplingParams) -> Table:
    """Compare plain decoding and a draft model on the prompts once more, with nothing streamed or cached."""
    table = Table(title="the same prompts, plain and with a draft model", title_justify="left")
    for heading in ("", "plain", "draft model"):
        table.add_column(heading, justify="right" if heading else "left")
    # As many drafts in every round: the default would try programs with fewer, and compile them.
    speculating = LLM(speculative_config={"method": "draft_model", "adaptive": None})
    seconds: dict[LLM, list[float]] = {plain: [], speculating: []}
    answers = {}
    for _ in range(RUNS + 1):  # the first one compiles
        for llm, taken in seconds.items():
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            outputs = llm.chat(prompts, params, use_tqdm=False)
            taken.append(time.perf_counter() - begin)
            answers[llm] = [output.outputs[0].token_ids for output in outputs]
    tokens = sum(map(len, answers[plain]))
    best = {llm: min(taken[1:]) for llm, taken in seconds.items()}
    metrics = speculating.get_metrics()
    accepted = metrics.spec_decode_num_accepted_tokens / max(1, metrics.spec_decode_num_draft_tokens)
    table.add_row("output tokens per second", f"{tokens / best[plain]:.0f}", f"{tokens / best[speculating]:.0f}")
    table.add_row("drafted tokens that were accepted", "", f"{accepted:.0%}")
    table.add_row("same tokens", "", "yes" if answers[plain] == answers[speculating] else "no")
    return table


if __name__ == "__main__":
    main()
