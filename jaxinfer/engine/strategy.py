"""Ways for rows to go on once their prompts are computed: what the scheduler and the engine need to know of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.decode_loop import DecodeLoop
from jaxinfer.programs.program import Program


class RowKind(enum.Enum):
    """What a row of a launch does."""

    PROMPT_CHUNK = "prompt chunk"  # computes tokens that the host knows; the last chunk samples one
    DECODE = "decode"  # computes the latest token, which is in its seat, and samples the next one
    VERIFICATION = "verification"  # drafts tokens and keeps those that decoding would have sampled
    BLOCK = "block"  # denoises a block of tokens


@dataclass(frozen=True)
class Rounds:
    """A launch of rows that are all in their seats: how many rounds it may run, and what each round lands for a row.

    A sequence that ends lands no more, whatever `least_tokens` says.
    """

    kind: RowKind = RowKind.DECODE
    most: int = 1  # rounds in one launch
    most_tokens: int = 1
    least_tokens: int = 1


class Strategy(Protocol):
    """A way to decode in rounds. What it chooses may change from launch to launch, and changes no token."""

    @property
    def rounds(self) -> Rounds: ...

    @property
    def programs(self) -> Sequence[Program]:
        """What the engine compiles for it, besides the programs of plain decoding."""
        ...

    @property
    def models(self) -> Mapping[str, DecoderLM]:
        """Models that its programs read, besides the target."""
        ...

    @property
    def state(self) -> Mapping[str, Any]:
        """Parts of the device's state that its programs change, besides the target's pool and the seats."""
        ...

    @property
    def program(self) -> Program:
        """Runs `PackedBatch["num_steps"]` rounds; its results are the tokens int32 [N, Q], in order for each row, with
        -1 where none landed."""
        ...

    def shape_for(self, *, rows: int, pages_per_row: int) -> Any:
        """The smallest of the program's shapes that holds a launch."""
        ...


class PlainDecoding:
    """One token after the other, several steps in a launch."""

    programs: Sequence[Program] = ()
    models: Mapping[str, DecoderLM] = {}
    state: Mapping[str, Any] = {}

    def __init__(self, program: DecodeLoop, buckets: Buckets) -> None:
        self.program = program
        self.rounds = Rounds(RowKind.DECODE, most=program.max_steps)
        self._buckets = buckets

    def shape_for(self, *, rows: int, pages_per_row: int) -> Any:
        return self._buckets.loop_for(decode_rows=rows, pages_per_row=pages_per_row)
