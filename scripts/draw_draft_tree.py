"""Draw the draft trees of a prompt's first rounds, with the probability of each token given its path; accepted tokens
are marked."""

from __future__ import annotations

import argparse

from jaxinfer import LLM, SamplingParams
from jaxinfer.speculative.drawing import draw_tree
from jaxinfer.strategies.speculation import Speculation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Make a plan with four points: bake bread.")
    parser.add_argument("--model", default="tiny", help="checkpoint directory or hub id (default: the embedded one)")
    parser.add_argument("--head", help="checkpoint directory or hub id (default: the embedded one)")
    parser.add_argument("--rounds", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--nodes", type=int, default=20, help="of a tree (default: 20)")
    parser.add_argument("--depth", type=int, default=7, help="levels after the first (default: 7)")
    parser.add_argument("--top-k", type=int, default=10, help="children of a node (default: 10)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    speculative = {
        "method": "eagle3", "model": options.head, "adaptive": None, "num_speculative_tokens": options.nodes,
        "tree_depth": options.depth, "tree_top_k": options.top_k,
    }  # fmt: skip
    llm = LLM(options.model, max_num_seqs=1, speculative_config=speculative)
    strategy, tokenizer = llm.core.strategy, llm.get_tokenizer()
    assert isinstance(strategy, Speculation) and tokenizer is not None

    def show(token: int) -> str:
        return repr(tokenizer.decode([token]))[1:-1] or "''"

    params = SamplingParams(temperature=options.temperature, seed=options.seed, max_tokens=64)
    root, drawn, latest = None, 0, None
    for output in llm.stream([{"role": "user", "content": options.prompt}], params):
        landed = output.outputs[0].token_ids
        found = strategy.latest
        if found is not None and found is not latest and root is not None and found.output.tree is not None:
            latest, drawn = found, drawn + 1
            print(f"\nround {drawn}: {len(landed)} tokens landed")
            print(draw_tree(found.output.tree, int(found.rows[0]), root, landed, show))
        if drawn == options.rounds:
            break
        root = landed[-1] if landed else root
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
