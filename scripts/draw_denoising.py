"""Draw the blocks of a diffusion model's answer as they fill in: a line of cells for each round, new words green."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from jaxinfer import LLM, SamplingParams
from jaxinfer.cli.show_denoising import BlockHistory, BlockRound
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.engine.strategy import LandedRounds
from jaxinfer.strategies.diffusion import DiffusionStrategy

SYSTEM = "Answer with [PLAN] and a list of points, or with [DIRECT] and one short answer."
CELL, LINE, GAP = 0.82, 0.3, 0.12  # inches: width of a token, height of a round, space between blocks
MASKED, NEW, KEPT = "#d0d4da", "#8fd19e", "#f4f5f7"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="I am Negrel. Make a plan: make a film of a birthday party.")
    parser.add_argument("--system", default=SYSTEM, help="default: what makes the embedded model plan")
    parser.add_argument("--model", default="tiny-diffusion", help="checkpoint directory or hub id (default: embedded)")
    parser.add_argument("--output", type=Path, default=Path("denoising.png"), help="default: %(default)s")
    parser.add_argument("--threshold", type=float, default=0.9, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    options = parser.parse_args()
    llm = LLM(options.model, max_num_seqs=1, diffusion_config={"threshold": options.threshold})
    strategy, tokenizer = llm.core.strategy, llm.get_tokenizer()
    if not isinstance(strategy, DiffusionStrategy) or tokenizer is None:
        parser.error(f"{options.model} is no diffusion model with a tokenizer")
    history, rounds = BlockHistory(), list[BlockRound]()

    def listen(landed: LandedRounds[DenoiseOutput]) -> None:
        rounds.extend(history.rounds(landed) if landed.requests else ())

    strategy.listeners.append(listen)
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    asked = {"system": options.system, "user": options.prompt}
    messages = [{"role": role, "content": content} for role, content in asked.items() if content]
    (output,) = llm.chat([messages], params, use_tqdm=False)
    count = len(output.outputs[0].token_ids)
    draw(rounds, strategy.mask_token_id, lambda token: tokenizer.decode([token]), options.output)
    print(f"{count} tokens in {len(rounds)} forwards, {count / len(rounds):.1f} a forward: {options.output}")
    return 0


def draw(rounds: list[BlockRound], mask: int, text_of: Callable[[int], str], path: Path) -> None:
    """A picture of rounds, one below the other. Rounds in which nothing changes are left out: they compute the keys and
    values of a finished block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    shown = [each for each in rounds if each.number == 1 or any(each.is_new)]
    width = CELL * max(len(each.tokens) for each in shown)
    starts = [each.start for each in shown]
    height = LINE * len(shown) + GAP * (len(set(starts)) - 1)
    figure = pyplot.figure(figsize=(width, height), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    top = 0.0
    for number, each in enumerate(shown):
        top += GAP if number and each.start != starts[number - 1] else 0.0
        for place, (token, is_new) in enumerate(zip(each.tokens, each.is_new, strict=True)):
            colour = MASKED if token == mask else NEW if is_new else KEPT
            corner = (place * CELL + 0.02, top + 0.02)
            axes.add_patch(Rectangle(corner, CELL - 0.04, LINE - 0.04, facecolor=colour))
            if token != mask:
                word = text_of(token).replace("\n", "⏎")
                axes.text((place + 0.5) * CELL, top + LINE / 2, word, ha="center", va="center", fontsize=8)
        top += LINE
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
