"""Draft trees drawn as text: their tokens, the probabilities, and which were accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.speculative.tree import ROOT, Tree


def draw_tree(tree: Tree, row: int, root: int, landed: Sequence[int], show: Callable[[int], str]) -> str:
    """Draw the tree of one sequence, with a line for each node.

    Args:
        tree: of R sequences, as a launch of rounds has left it.
        row: of the sequence.
        root: the sequence's latest token at the start of the round.
        landed: tokens that landed in the round, the one after the accepted drafts included. Nodes on their path are
            marked with `*`.
        show: returns the text of a token.
    """
    tokens, parents, scores = (np.asarray(field)[row].tolist() for field in (tree.tokens, tree.parent, tree.score))
    there = [number for number, score in enumerate(scores) if score > -np.inf]
    children: dict[int, list[int]] = {}
    for number in there:
        children.setdefault(parents[number], []).append(number)
    lines = [f"{show(root)}"]

    def draw(node: int, margin: str, way: Sequence[int] | None) -> None:
        """Draw the nodes below a node; `way`: the tokens that landed after it, None if it was not accepted."""
        below = children.get(node, [])
        for number in below:
            before = scores[node] if node != ROOT else 0.0
            accepted = bool(way) and tokens[number] == way[0]
            last = number == below[-1]
            mark = " *" if accepted else ""
            lines.append(
                f"{margin}{'└─' if last else '├─'} {show(tokens[number])} {np.exp(scores[number] - before):.2f}{mark}"
            )
            draw(number, margin + ("   " if last else "│  "), way[1:] if accepted and way else None)

    draw(ROOT, "", landed)
    return "\n".join(lines)
