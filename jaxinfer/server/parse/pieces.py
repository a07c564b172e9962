"""What a parser finds: text, reasoning, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Text:
    """Content of the answer."""

    text: str


@dataclass
class Thought:
    """Reasoning."""

    text: str


@dataclass
class CallBegin:
    """A call whose name is known."""

    index: int
    name: str


@dataclass
class CallArguments:
    """Further characters of a call's arguments, which are JSON when the call ends."""

    index: int
    text: str


@dataclass
class CallEnd:
    """The end of a call.

    Attributes:
        is_cut: the answer has ended within it.
    """

    index: int
    is_cut: bool = False


type Piece = Text | Thought | CallBegin | CallArguments | CallEnd


def joined(pieces: list[Piece]) -> list[Piece]:
    """Pieces with neighbours of one kind as one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            found[-1] = CallArguments(last.index, last.text + piece.text)
        else:
            found.append(piece)
    return found
