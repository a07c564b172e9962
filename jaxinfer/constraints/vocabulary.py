"""Vocabularies: the bytes that each token adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.constraints.byte_trie import ByteTrie
from jaxinfer.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The bytes of all tokens, and the tokens that a grammar may name.

    A token may end in the middle of a character. Stripping at the edges of a text is not taken into account.

    Args:
        pieces: bytes that each token adds to a text; None or empty for tokens that add none, such as special tokens.
        markers: the tokenizer's added tokens, special or not: text -> id.
        size: number of a model's logits, which may exceed the number of tokens; None: equal to it.

    Raises:
        ValueError: there are more tokens than logits, or a marker's id is out of range.
    """

    def __init__(
        self, pieces: Sequence[bytes | None], *, markers: Mapping[str, int] | None = None, size: int | None = None
    ) -> None:
        self.size = len(pieces) if size is None else size
        if self.size < len(pieces):
            raise ValueError(f"size must be at least the number of tokens ({len(pieces)}), got {size}")
        self.pieces: tuple[bytes | None, ...] = (*pieces, *(None,) * (self.size - len(pieces)))
        self.markers = dict(markers or {})
        if not all(0 <= token < self.size for token in self.markers.values()):
            raise ValueError(f"markers must be tokens below {self.size}, got {self.markers}")
        self.trie = ByteTrie(self.pieces)
        self.single_bytes = np.zeros(256, bool)  # bytes that are tokens of their own
        self.single_bytes[[piece[0] for piece in self.pieces if piece is not None and len(piece) == 1]] = True

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        """The vocabulary of a tokenizer for a model of `size` logits.

        Raises:
            ValueError: the tokenizer has more tokens than that, or its decoder is not supported.
        """
        fast = tokenizer.fast
        decoders = [] if fast.decoder is None else _token_decoders(json.loads(fast.decoder.__getstate__()))
        added = fast.get_added_tokens_decoder()
        special = {token for token, about in added.items() if about.special}
        tokens = {token: text for text, token in fast.get_vocab(with_added_tokens=True).items()}
        pieces = [
            None if token in special or token not in tokens else _bytes_of(tokens[token], decoders)
            for token in range(max(tokens, default=-1) + 1)
        ]
        return cls(pieces, markers={about.content: token for token, about in added.items()}, size=size)


def _token_decoders(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the decoders that change tokens one by one; later ones may only join them and strip the text's edges."""
    members = _flatten(decoder)
    kinds = [member["type"] for member in members]
    joined = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    for member, kind in zip(members[:joined], kinds[:joined], strict=True):
        by_text = kind == "Replace" and "String" in member["pattern"]
        if not by_text and kind not in ("ByteLevel", "ByteFallback", "Metaspace"):
            raise ValueError(f"what a token adds to a text is not known for decoders of the kind {kind}")
    if not set(kinds[joined:]) <= {"Fuse", "Strip"}:
        raise ValueError(f"what a token adds to a text is not known for decoders that end in {kinds[joined:]}")
    return members[:joined]


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        return [inner for member in decoder["decoders"] for inner in _flatten(member)]
    return [decoder]


def _bytes_of(token: str, decoders: Sequence[Mapping[str, Any]]) -> bytes:
    for decoder in decoders:
        match decoder["type"]:
            case "ByteLevel":
                # Added tokens are plain text in the vocabulary; a character that encodes no byte reveals them.
                known = all(letter in _BYTE_OF_LETTER for letter in token)
                return bytes(_BYTE_OF_LETTER[letter] for letter in token) if known else token.encode()
            case "ByteFallback":
                byte = _BYTE_TOKEN.fullmatch(token)
                if byte is not None:
                    return bytes([int(byte[1], 16)])
            case "Metaspace":
                token = token.replace(decoder["replacement"], " ")
            case _:
                token = token.replace(decoder["pattern"]["String"], decoder["content"])
    return token.encode()


def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (Radford et al. 2019, GPT-2).

    Printable characters of Latin-1 stand for themselves; the other bytes have the letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()
