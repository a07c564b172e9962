"""Documents of the tiny corpus as training batches: packed rows with document ids, positions and loss weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
from transformers import PreTrainedTokenizerFast

from training.corpus import Sample
from training.tokenizer import encode_document

POOL = 600


@dataclass(frozen=True)
class Document:
    """Token ids of one sample and which of them the model is to write."""

    ids: list[int]
    written: list[bool]


@dataclass(frozen=True)
class Rows:
    """Packed rows, all int32 or float32 [rows, length]. `documents` is 0 where there is padding, and `weights` is the
    weight of predicting the token there (0 at the first token of a document and at padding)."""

    ids: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    weights: np.ndarray

    @property
    def tokens(self) -> int:
        return int((self.documents > 0).sum())

    def arrays(self) -> dict[str, np.ndarray]:
        """What a training step is given of them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def documents_of(tokenizer: PreTrainedTokenizerFast, samples: Iterator[Sample]) -> Iterator[Document]:
    for sample in samples:
        yield Document(*encode_document(tokenizer, sample))


def pack_rows(chosen: list[list[Document]], length: int, prompt_weight: float) -> Rows:
    """Pack documents into rows of `length` tokens. Tokens that the user writes count `prompt_weight` instead of 1."""
    shape = (len(chosen), length)
    ids, positions, documents = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    for row, members in enumerate(chosen):
        start = 0
        for number, document in enumerate(members, start=1):
            end = start + len(document.ids)
            ids[row, start:end] = document.ids
            positions[row, start:end] = np.arange(end - start)
            documents[row, start:end] = number
            weights[row, start:end] = np.where(document.written, 1.0, prompt_weight)
            weights[row, start] = 0.0
            start = end
    return Rows(ids, positions, documents, weights)


class Packer[R: Rows]:
    """Turns a stream of documents into steps of several groups of rows, for instance 16 rows of 128 and 8 of 256.

    Rows of each group are filled from a pool: the oldest document that needs this length, then the longest that fit.
    Documents longer than the longest row are left out; `left_out` counts them. `pack` lays those of each row into rows
    of a length.
    """

    def __init__(self, documents: Iterator[Document], pack: Callable[[list[list[Document]], int], R]) -> None:
        self.documents = documents
        self.pack = pack
        self.pool: list[Document] = []
        self.left_out = 0

    def step(self, groups: tuple[tuple[int, int], ...]) -> list[R]:
        """One step; a group is (rows, length), shortest length first."""
        longest = groups[-1][1]
        while len(self.pool) < POOL:
            document = next(self.documents)
            if len(document.ids) <= longest:
                self.pool.append(document)
            else:
                self.left_out += 1
        lengths = [length for _, length in groups]
        packed = []
        for shorter, (rows, length) in reversed(list(zip([0, *lengths[:-1]], groups, strict=True))):
            packed.append(self.pack([self._fill(shorter, length) for _ in range(rows)], length))
        return packed[::-1]

    def _fill(self, shorter: int, length: int) -> list[Document]:
        first = next((i for i, document in enumerate(self.pool) if shorter < len(document.ids) <= length), None)
        if first is None:
            first = self._shorter(length)
        row = [self.pool.pop(first)]
        room = length - len(row[0].ids)
        while True:
            fitting = [i for i, document in enumerate(self.pool) if len(document.ids) <= room]
            if not fitting:
                return row
            best = max(fitting, key=lambda i: (len(self.pool[i].ids), -i))
            row.append(self.pool.pop(best))
            room -= len(row[-1].ids)

    def _shorter(self, length: int) -> int:
        """The index of the oldest document of at most `length` tokens; the stream is read on until there is one."""
        index = 0
        while len(self.pool[index].ids) > length:
            index += 1
            if index == len(self.pool):
                self.pool.append(next(self.documents))
        return index
