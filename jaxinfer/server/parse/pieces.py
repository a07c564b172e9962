"""What a parser finds: text, reasoning, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


class AnswerParser(Protocol):
    """A parser of one answer: what it finds depends on the characters alone, never on how they were cut."""

    @property
    def reasoning_end(self) -> int:
        """Characters of the answer up to the end of its reasoning, with the tags; 0: it has had none yet."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Read further text; returns what it brings."""
        ...

    def finish(self) -> list[Piece]:
        """End the answer; returns what was held back."""
        ...


def pieces_of(parser: AnswerParser | None, text: str, *, is_last: bool) -> list[Piece]:
    """What further text of an answer brings; without a parser, the text is content as it is."""
    if parser is None:
        return [Text(text)] if text else []
    return parser.feed(text) + (parser.finish() if is_last else [])


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
