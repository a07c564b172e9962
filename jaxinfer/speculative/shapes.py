"""The few shapes of rounds and of catching up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets, lane_pages_for, shape_of
from jaxinfer.speculative.proposer import RoundsShape

# Most tokens that a round verifies over all rows: each gets a row of logits, of up to 150,000 tokens.
MOST_VERIFIED = 1024
# Up to so many rows there is a shape for each power of two, above for every other one. Wider page tables have shapes
# for every other one throughout, and only for the most drafts.
_ROWS_OF_ALL_POWERS = 32
# With fewer rows, verifying few drafts takes as long as verifying many.
_FEWEST_ROWS_OF_ALL_WIDTHS = 4
# Branches have few shapes: each speculative program costs memory maps.
_FEWEST_OF_LANES = 16
_NO_BATCH = BatchShape(0, 0, 0, 0)
_CATCH_UP_TOKENS = 256
_TOKENS_PER_ROW = 16


@dataclass(frozen=True)
class SpeculationShapes:
    """All shapes of an engine that speculates, in ascending order."""

    rounds: tuple[RoundsShape, ...]
    lanes: tuple[RoundsShape, ...]  # for rounds whose sequences share lanes
    catch_up: tuple[BatchShape, ...]

    @classmethod
    def of(
        cls,
        buckets: Buckets,
        *,
        widths: Sequence[int],
        num_widths: int = 2,
        max_rounds: int,
        page_size: int,
        num_nodes: int = 0,
        tree_width: int = 0,
    ) -> SpeculationShapes:
        """Choose the shapes of an engine that drafts chains, or chains and trees.

        Args:
            widths: tokens of each row in verifications of chains (drafts plus one), ascending.
            num_widths: number of widths, the largest that fit, for each number of rows.
            max_rounds: of a launch.
            num_nodes: of trees; 0: there are none.
            tree_width: most tokens that land of a tree.
        """
        most = min(MOST_VERIFIED, buckets.max_num_batched_tokens)
        rounds = []
        for pages in buckets.pages_per_row:
            is_first = pages == buckets.pages_per_row[0]
            for rows in _some(buckets.decode_rows, _ROWS_OF_ALL_POWERS if is_first else 1):
                fitting = [width for width in widths if rows * width <= most]
                chosen = fitting[-num_widths:] if is_first and rows >= _FEWEST_ROWS_OF_ALL_WIDTHS else fitting[-1:]
                rounds += [RoundsShape(shape_of(rows, 0, 0, pages), width) for width in chosen]
                trees = rows * (1 + num_nodes) <= most if num_nodes else False
                rounds += [RoundsShape(shape_of(rows, 0, 0, pages), tree_width, num_nodes)] if trees else []
        # A launch is built while another one is in flight, which may land as many tokens.
        lane_pages = lane_pages_for(2 * max_rounds * max(widths[-1], tree_width), page_size)
        lanes = []
        for drafts in (RoundsShape(_NO_BATCH, widths[-1]), RoundsShape(_NO_BATCH, tree_width, num_nodes)):
            of_drafts = [
                drafts._replace(batch=shape)
                for shape in buckets.all_lanes(lane_pages)
                if shape.num_tokens * drafts.verified <= most and shape.pages_per_row == buckets.pages_per_row[-1]
            ]
            enough = [shape for shape in of_drafts if shape.batch.num_tokens >= _FEWEST_OF_LANES]
            lanes += (enough or of_drafts[-1:]) if drafts.width else []
        tokens = sorted({min(_CATCH_UP_TOKENS, buckets.max_num_batched_tokens), buckets.max_num_batched_tokens})
        catch_up = [
            shape_of(0, max(1, min(buckets.max_num_seqs, count // _TOKENS_PER_ROW)), count, pages)
            for pages in buckets.pages_per_row
            for count in tokens
        ]
        return cls(tuple(rounds), tuple(lanes), tuple(catch_up))

    @property
    def longest_chain(self) -> int:
        """Most drafts of a chain."""
        return max(shape.width for shape in self.rounds if not shape.num_nodes) - 1

    @property
    def most_in_trees(self) -> int:
        """Most sequences of a launch of trees."""
        return max((shape.batch.num_rows for shape in (*self.rounds, *self.lanes) if shape.num_nodes), default=0)

    def rounds_for(
        self, *, rows: int, pages_per_row: int, num_drafts: int, num_nodes: int = 0, lanes: bool = False
    ) -> RoundsShape | None:
        """Return the smallest shape that holds a launch, of rows or of sequences in lanes; None: there is none."""
        holding = [
            shape
            for shape in (self.lanes if lanes else self.rounds)
            if shape.batch.num_rows >= rows
            and shape.batch.pages_per_row >= pages_per_row
            and shape.width > num_drafts
            and shape.num_nodes == num_nodes
        ]
        return min(holding, key=lambda s: (s.batch.pages_per_row, s.batch.num_rows, s.width), default=None)

    def rounds_of(self, batch: BatchShape, num_drafts: int, num_nodes: int) -> RoundsShape:
        """Return the shape of a launch with such a batch."""
        return min(
            (
                shape
                for shape in (*self.lanes, *self.rounds)
                if shape.batch == batch and shape.width > num_drafts and shape.num_nodes == num_nodes
            ),
            key=lambda shape: shape.width,
        )

    def catch_up_for(self, *, rows: int, tokens: int, pages_per_row: int) -> BatchShape:
        """Return the smallest shape for so many rows and tokens; without one, the largest with such page tables."""
        wide = [shape for shape in self.catch_up if shape.pages_per_row >= pages_per_row]
        pages = min(shape.pages_per_row for shape in wide)
        fitting = [shape for shape in wide if shape.pages_per_row == pages]
        holding = [shape for shape in fitting if shape.num_rows >= rows and shape.num_tokens >= tokens]
        return min(holding or fitting[-1:], key=lambda shape: shape.num_tokens)


def _some(powers: Sequence[int], first: int) -> list[int]:
    """Return all powers up to `first`, every other one above, and the last."""
    few = [power for power in powers if power <= first]
    return sorted({*few, *powers[len(few) + 1 :: 2], powers[-1]})
