"""Entries from the host into seats before a launch: latest tokens, and the bounds of draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from jaxinfer.programs.entry import Enters, Entry, EntryShape, PackedEntry
from jaxinfer.programs.runner import Runner
from jaxinfer.sampling.bounds import packed_bits
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler_output import SchedulerOutput


class _Entering(NamedTuple):
    """An entry into one seat."""

    what: Enters
    request: Request
    decodes: bool = False
    mask: np.ndarray | None = None  # bits, of the next draw
    counts: Sequence[tuple[int, int]] = ()  # (token, how often it is in the output)


class SeatEntries:
    """Launches the entries of one engine, before the launches that need them.

    The bounds of a sequence without any are entered only if the sequence before it in its seat had some. A sequence
    with a guard enters with the mask of its next draw, and anew each time that it continues from other tokens than were
    drawn; where all of its draws have masks, one enters before each.

    Args:
        is_known: whether the seats are known to have no bounds; a recovery leaves them as they were.
    """

    def __init__(self, program: Entry, runner: Runner, *, num_seats: int, vocab: int, is_known: bool) -> None:
        self._program, self._runner, self._vocab = program, runner, vocab
        self._shape_of = program.shape_of
        self._num_seats = num_seats
        self._binds = np.full(num_seats, not is_known)
        self._entered: dict[int, tuple[str, int]] = {}  # seat -> id and epoch of the guarded request that has entered

    def launch(self, output: SchedulerOutput) -> None:
        """Enter the rows of a launch into their seats, and bring their allowed sets up to date for the next draw."""
        found: list[_Entering] = []
        enters = output.enters
        arrivals = output.first_scheduled | output.resumed if output.first_scheduled or output.resumed else ()
        for request in output.requests:
            if not (arrivals or enters or request.guard):
                continue
            name = request.request_id
            if name in arrivals or (request.guard and self._entered.get(request.seat) != (name, request.epoch)):
                found += self._entering(request, decodes=name in enters)
                continue
            if request.has_masks and request.in_seat:
                found.append(_Entering(Enters.MASK, request, mask=request.next_mask(self._vocab)))
            if name in enters:
                found.append(_Entering(Enters.TOKENS, request, decodes=True))
        if not found:
            return
        apart: dict[Enters, list[_Entering]] = {Enters.ALL: [], Enters.MASK: [], Enters.TOKENS: []}
        for entering in found:
            apart[Enters.ALL if entering.what is Enters.COUNTS else entering.what].append(entering)
        for what, some in apart.items():
            self._launch(some, self._shape_of[what])

    def _entering(self, request: Request, *, decodes: bool) -> list[_Entering]:
        seat = request.seat
        self._entered.pop(seat, None)
        binds = request.is_bound_for_good or request.guard is not None
        if not binds and not self._binds[seat]:
            return [_Entering(Enters.TOKENS, request, decodes)] if decodes else []
        self._binds[seat] = binds
        counts: list[tuple[int, int]] = []
        if request.is_penalized:
            counts = list(Counter(islice(request.token_ids, request.num_prompt_tokens, request.num_tokens - 1)).items())
        room = self._shape_of[Enters.ALL].num_counts
        mask = None
        if request.guard is not None:
            self._entered[seat] = request.request_id, request.epoch
            mask = request.next_mask(self._vocab)
        first = _Entering(Enters.ALL, request, decodes, mask, counts[:room])
        more = [counts[start : start + room] for start in range(room, len(counts), room)]
        return [first, *(_Entering(Enters.COUNTS, request, counts=some) for some in more)]

    def _launch(self, entering: Sequence[_Entering], shape: EntryShape) -> None:
        packed, place, used = None, 0, 0
        for one in entering:
            if packed is None or place == shape.num_seats or used + len(one.counts) > shape.num_counts:
                if packed is not None:
                    self._run(packed)
                packed, place, used = PackedEntry(shape, self._num_seats), 0, 0
            self._fill(packed, place, used, one)
            place, used = place + 1, used + len(one.counts)
        if packed is not None:
            self._run(packed)

    def _fill(self, packed: PackedEntry, place: int, used: int, entering: _Entering) -> None:
        what, request = entering.what, entering.request
        packed["seat"][place] = request.seat
        if entering.mask is not None:
            # A search chooses from the list of likely tokens.
            packed["masked_at"][place], packed["masks_list"][place] = request.num_tokens, request.is_steered
            packed["mask"][place] = entering.mask
        if entering.decodes:
            known = request.token_ids
            packed["token"][place], packed["before"][place] = known[-1], known[-2] if len(known) > 1 else 0
            packed["length"][place] = len(known)
        if what in (Enters.MASK, Enters.TOKENS):
            return
        packed["enters"][place] = what
        if entering.counts:
            where = slice(used, used + len(entering.counts))
            packed["count_of"][where] = place
            packed["count_token"][where], packed["count"][where] = zip(*entering.counts, strict=True)
        if what is Enters.COUNTS:
            return
        packed["binds"][place] = request.is_bound_for_good
        params, vocab = request.sampling_params, self._vocab
        packed["allowed"][place] = packed_bits(request.base_set(vocab))
        if params.min_tokens:
            packed["ending"][place] = packed_bits(_mask(request.ending_token_ids, vocab))
            packed["min_length"][place] = request.num_prompt_tokens + params.min_tokens
        if params.repetition_penalty != 1.0:
            packed["in_prompt"][place] = request.prompt_bits(vocab)
        packed["prompt_length"][place] = request.num_prompt_tokens
        biases = params.logit_bias or {}
        packed["bias_token"][place] = vocab
        packed["bias_token"][place, : len(biases)] = list(biases)
        packed["bias"][place, : len(biases)] = list(biases.values())
        packed["repetition_penalty"][place] = params.repetition_penalty
        packed["frequency_penalty"][place] = params.frequency_penalty
        packed["presence_penalty"][place] = params.presence_penalty

    def _run(self, packed: PackedEntry) -> None:
        self._runner.launch(self._program, packed.shape, packed.buffer)


def _mask(tokens: Sequence[int] | frozenset[int], vocab: int) -> np.ndarray:
    mask = np.zeros(vocab, bool)
    mask[list(tokens)] = True
    return mask
