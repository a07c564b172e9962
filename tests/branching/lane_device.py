"""A device in plain Python that reads packed batches, lanes included, by the rules of the one that is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.branching.bim import TRUNK
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch
from jaxinfer.programs.buckets import Buckets, lane_pages_for
from jaxinfer.programs.stand_ins import StandIn
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerOutput
from tests.engine.fake_device import VOCAB, FakeDevice, Simulation, next_token


class ExactShapes:
    """Launches of rounds come in just the shape that they need, and lanes may write what they do in an engine.

    Args:
        longest: pages of the longest lane.
    """

    def __init__(self, rounds: Rounds, page_size: int, longest: int) -> None:
        self.longest = longest
        tokens = rounds.most * rounds.most_tokens
        # Of rounds that land any number of tokens, one more launch may be in flight.
        self.lane_pages = lane_pages_for(tokens if rounds.kind is RowKind.DECODE else 2 * tokens, page_size)

    def shape_for(self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool, stand_in: StandIn) -> BatchShape:
        assert pages_per_row <= self.longest, f"no lane is {pages_per_row} pages long"
        if lanes:
            return BatchShape.of_lanes(rows, pages_per_row, self.lane_pages)
        return BatchShape(rows, 0, 0, pages_per_row)


class LaneDevice(FakeDevice):
    """A fake device that knows a launch by its packed batch alone, and sequences by what is in their seats.

    A sequence gets a wrong token unless the slots that it sees hold all of its tokens, at their positions, in order.

    Args:
        batch: makes the packed batches.
    """

    def __init__(self, batch: InputBatch, tokens_of_round: Callable[[], int]) -> None:
        super().__init__(batch.page_size, tokens_of_round)
        self.batch = batch
        self.latest: dict[int, tuple[int | None, int]] = {}  # seat -> latest token, None: ended; and length
        self.lanes_read: list[int] = []  # of each launch of lanes, the most sequences of a lane

    def run(self, output: SchedulerOutput) -> list[list[int]]:
        self.batch.remove(output.finished_req_ids | output.preempted_req_ids)
        if not output.requests:
            return []
        built = self.batch.build(output)
        self._write_chunks(built.packed)
        for request in output.requests:
            if request.request_id in output.enters:
                self.latest[request.seat] = (request.token_ids[-1], request.num_tokens)
        results: list[list[int]] = [[] for _ in output.requests]
        is_chunk = [kind is RowKind.PROMPT_CHUNK for kind in output.kinds]
        for index in np.flatnonzero(is_chunk).tolist():
            length = output.num_computed[index] + output.num_tokens[index]
            if output.most_tokens[index]:
                read = self._visible(built.packed, int(built.rows[index]), length - 1, TRUNK)
                results[index] = [self._land(built.packed, int(built.logits_rows[index]), read, length)]
            else:
                results[index] = [-2]  # not to be read
        if built.packed.shape.lane_pages:
            self.lanes_read.append(int(np.diff(built.packed["query_start_loc"]).max()))
        for index in np.flatnonzero(~np.asarray(is_chunk)).tolist():
            for _ in range(output.rounds_of[index] if output.rounds_of else 1):
                for _ in range(1 if output.kinds[index] is RowKind.DECODE else self.tokens_of_round()):
                    results[index] += self._decode(built, index)
        return results

    def _write_chunks(self, packed: PackedBatch) -> None:
        first = packed.shape.decode_rows
        if packed.shape.lane_pages:
            return
        for slot, position, token in zip(
            *(packed[name][first:].tolist() for name in ("slot_mapping", "positions", "token_ids")), strict=True
        ):
            self.slots[slot] = (position, token)

    def _decode(self, built: BuiltBatch, index: int) -> list[int]:
        """The next token of a seated sequence; none if it has ended, or has no room."""
        packed, place = built.packed, int(built.rows[index])
        token, length = self.latest[int(packed["row_seat"][place])]
        if token is None or length > packed["capacity"][place]:
            return []
        row, branch = place, TRUNK
        column, offset = divmod(length - 1, self.page_size)
        if packed.shape.lane_pages:
            row, branch = int(packed["row"][place]), int(packed["branch"][place])
            starts = packed["query_start_loc"]
            assert starts[row] <= place < starts[row + 1], "a sequence is outside of its lane"
            where = np.clip(column - packed["first_page"][place], 0, packed.shape.lane_pages - 1)
            column = int(packed["lane_page"][place, where])
        slot = int(packed["page_table"][row, column]) * self.page_size + offset
        self.slots[slot] = (length - 1, token)
        read = self._visible(packed, row, column * self.page_size + offset, branch)
        return [self._land(packed, int(built.logits_rows[index]), read, length)]

    def _visible(self, packed: PackedBatch, row: int, limit: int, branch: int) -> list[tuple[int, int]]:
        """What a token with this limit and branch sees: (position, token) of each slot, in order."""
        size, seen = self.page_size, []
        for index in range(limit + 1):
            page = index // size
            if not packed.shape.lane_pages or (
                index < packed["kv_len"][row]
                and (index < packed["trunk_len"][row] or packed["page_branch"][row, page] == branch)
            ):
                seen.append(self.slots.get(int(packed["page_table"][row, page]) * size + index % size, (-1, -1)))
        return seen

    def _land(self, packed: PackedBatch, sample: int, read: Sequence[tuple[int, int]], length: int) -> int:
        in_place = [position for position, _ in read] == list(range(length))
        token = next_token([token for _, token in read]) if in_place else VOCAB
        ends = token in packed["ending_token_ids"][sample].tolist() or length + 1 >= packed["max_len"][sample]
        self.latest[int(packed["seat"][sample])] = (None if ends else token, length + 1)
        return token


class GroupSimulation(Simulation):
    """A scheduler of groups and requests over a device that reads packed batches.

    Args:
        max_len: most tokens of a sequence; lanes are as long.
    """

    device: LaneDevice

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        budget: int = 32,
        rows: int = 4,
        max_len: int = 160,
        rounds: Rounds | None = None,
        tokens_of_round: Callable[[], int] = lambda: 1,
        policy: str = "fcfs",
        caching: bool = False,
    ) -> None:
        rounds = rounds or Rounds()
        buckets = Buckets.from_limits(
            max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=max_len, page_size=page_size
        )
        shapes = ExactShapes(rounds, page_size, buckets.pages_per_row[-1])
        batch = InputBatch(buckets, shapes, page_size=page_size, num_pages=num_pages)
        super().__init__(
            page_size=page_size, device=LaneDevice(batch, tokens_of_round), num_pages=num_pages, budget=budget,
            rows=rows, prefill_room=buckets.prefill_room, policy=policy, rounds=rounds, caching=caching,
        )  # fmt: skip

    def add_group(self, group: RequestGroup) -> RequestGroup:
        for member in group.order:
            member.arrival = self.arrivals
            self.arrivals += 1
        if group.trunk is not None:
            group.trunk.arrival = group.order[0].arrival
        self.scheduler.add_group(group)
        return group
