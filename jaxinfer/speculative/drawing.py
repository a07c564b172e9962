"""A draft tree as text, for people: which tokens, how likely, and what of them was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.speculative.tree import ROOT, Tree


def draw_tree(tree: Tree, row: int, root: int, landed: Sequence[int], show: Callable[[int], str]) -> str:
    """The tree of one sequence, a line for each node.

    Args:
        tree: of R sequences, as a launch of rounds has left it.
        row: the sequence's.
        root: its latest token then.
        landed: tokens that landed in the round, the one behind the accepted drafts included: nodes on their way are
            marked with `*`.
        show: what to write of a token.
    """
    tokens, parents, scores = (np.asarray(of_all)[row].tolist() for of_all in (tree.tokens, tree.parent, tree.score))
    there = [number for number, score in enumerate(scores) if score > -np.inf]
    children: dict[int, list[int]] = {}
    for number in there:
        children.setdefault(parents[number], []).append(number)
    lines = [f"{show(root)}"]

    def draw(node: int, margin: str, way: Sequence[int] | None) -> None:
        """What stands below a node; `way`: the tokens that landed behind it, None if it was not accepted."""
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
