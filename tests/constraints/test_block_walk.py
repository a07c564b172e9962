"""Walks along the draws of diffusion blocks: what they commit, when a block lands, and how a sequence ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.block_walk import NO_SCORE_ERROR, Block, BlockLimits, begin_block, walk_block
from jaxinfer.constraints.guard import Guard
from jaxinfer.sampling.bounds import packed_bits
from jaxinfer.sampling.greatest import NO_SCORE

VOCAB, MASK, EOS, SIZE = 40, 39, 38, 4
ANY = range(30)


class Positions:
    """Allows at each position of the output the tokens that are named for it, and elsewhere any."""

    start = 0

    def __init__(self, at: Mapping[int, Iterable[int]]) -> None:
        self._at = {position: frozenset(tokens) for position, tokens in at.items()}

    def _tokens(self, state: int) -> frozenset[int]:
        if state < 0:
            return frozenset([EOS])
        found = self._at.get(state, frozenset(ANY))
        if not found:
            raise ConstraintError("what follows is unknown")
        return found

    def mask(self, state: int) -> np.ndarray:
        mask = np.zeros(VOCAB, bool)
        mask[sorted(self._tokens(state))] = True
        return mask

    def advance(self, state: int, token: int) -> int | None:
        if token not in self._tokens(state):
            return None
        return -1 if token == EOS else state + 1

    def bits(self, state: int) -> np.ndarray:
        return packed_bits(self.mask(state))

    def is_final(self, state: int) -> bool:
        return EOS in self._tokens(state)

    def forced(self, state: int) -> int | None:
        tokens = self._tokens(state)
        return min(tokens) if len(tokens) == 1 and EOS not in tokens else None

    def ends(self, state: int) -> bool:
        return self._tokens(state) == {EOS}


def limits(**given) -> BlockLimits:
    return BlockLimits(**{
        "size": SIZE, "vocab": VOCAB, "mask_token_id": MASK, "ending_token_ids": frozenset([EOS]),
        "max_total_tokens": 100, **given,
    })  # fmt: skip


def begun(guard: Guard, given: Iterable[int] = (), **how) -> Block:
    return begin_block(guard, guard.start, 8, list(given), limits(**how))


def guard_of(at: Mapping[int, Iterable[int]]) -> Guard:
    return Guard(Positions(at), (), [EOS])


def test_the_leftmost_place_and_the_allowed_draws_after_it_are_committed():
    guard = guard_of({2: [5, 6]})
    block = begun(guard, [7])  # its first place is given
    walk = walk_block(guard, block, [-1, 11, 12, 13], limits())
    after = walk.block
    assert after is not None and after.tokens == (7, 11, 12) and after.round == 1
    assert (walk.num_kept, walk.is_refused, walk.lands) == (2, True, False)
    assert after.mask is not None and (after.mask == packed_bits(Positions({2: [5, 6]}).mask(2))).all()


def test_draws_that_the_rule_does_not_commit_end_the_run():
    guard = guard_of({})
    walk = walk_block(guard, begun(guard), [3, -1, 4, 5], limits())
    assert walk.block is not None and walk.block.tokens == (3,) and not walk.is_refused


def test_tokens_that_follow_in_any_case_are_committed_without_a_draw():
    guard = guard_of({1: [20], 3: [21], 4: [22], 5: [23, 24]})
    walk = walk_block(guard, begun(guard), [3, 9, 4, -1], limits())
    after = walk.block
    assert after is not None and after.tokens == (3, 20, 4, 21) and after.forced == (20, 21) and walk.num_kept == 2
    assert not walk.lands and after.mask is None  # its keys and values are not final
    landed = walk_block(guard, after, [-1] * SIZE, limits())
    assert landed.tokens == (3, 20, 4, 21) and landed.num_computed == 12 and landed.forced == (20, 21)
    assert landed.block is not None and landed.block.tokens == (22,) and landed.block.start == 12
    assert landed.block.round == 0 and landed.block.num_given == 0


@pytest.mark.parametrize("first", [0, 2])
def test_a_block_takes_at_most_one_round_more_than_it_has_places(first):
    guard = guard_of({})
    block, rounds = begun(guard, range(first)), 0
    while True:
        drawn = [-1] * SIZE
        if len(block.tokens) < SIZE:
            drawn[len(block.tokens)] = 5
        walk = walk_block(guard, block, drawn, limits())
        rounds += 1
        assert walk.block is not None
        if walk.lands:
            break
        block = walk.block
    assert rounds == SIZE - first + 1


def test_an_end_that_the_grammar_allows_lands_the_block_at_once():
    guard = guard_of({1: [EOS, 4]})
    walk = walk_block(guard, begun(guard), [3, EOS, 5, 6], limits(ending_token_ids=frozenset()))
    assert walk.tokens == (3, EOS) and walk.is_complete and walk.block is None and walk.num_computed == 8


def test_where_only_the_end_may_follow_no_further_round_runs():
    guard = guard_of({4: [EOS]})
    walk = walk_block(guard, begun(guard), [1, 2, 3, 4], limits())
    assert walk.tokens == (1, 2, 3, 4, EOS) and walk.is_complete and walk.block is None
    assert walk.num_computed == 8 and walk.forced == (EOS,)


def test_a_block_that_was_forced_whole_lands_with_the_end_after_it():
    guard = guard_of({4: [1], 5: [2], 6: [3], 7: [4], 8: [EOS]})
    first = walk_block(guard, begun(guard), [5, 6, 7, 8], limits()).block
    assert first is not None
    second = walk_block(guard, first, [-1] * SIZE, limits()).block
    assert second is not None and second.tokens == (1, 2, 3, 4) and not second.is_last
    walk = walk_block(guard, second, [-1] * SIZE, limits())
    assert walk.tokens == (1, 2, 3, 4, EOS) and walk.is_complete and walk.block is None
    assert walk.num_computed == second.start + SIZE and walk.forced == (1, 2, 3, 4, EOS)


def test_other_ending_tokens_and_the_greatest_length_end_the_sequence():
    guard = guard_of({})
    stops = walk_block(guard, begun(guard), [1, 2, 3, 4], limits(ending_token_ids=frozenset([2])))
    assert stops.tokens == (1, 2) and stops.block is None and not stops.is_complete
    longest = walk_block(guard, begun(guard), [1, 2, 3, 4], limits(max_total_tokens=11))
    assert longest.tokens == (1, 2, 3) and longest.block is None and not longest.is_complete


def test_an_end_at_the_start_lands_with_the_first_round():
    guard = guard_of({0: [7], 1: [EOS]})
    block = begun(guard, [5])
    assert block.tokens == (5, 7, EOS) and block.is_last
    walk = walk_block(guard, block, [-1, -1, -1, 3], limits())
    assert walk.tokens == (7, EOS) and walk.is_complete and walk.num_kept == 0


def test_where_nothing_can_be_drawn_or_known_the_request_ends_with_the_reason():
    guard = guard_of({1: [], 2: [MASK]})
    failed = walk_block(guard, begun(guard), [NO_SCORE, -1, -1, -1], limits())
    assert failed.error == NO_SCORE_ERROR and failed.block is None and failed.lands
    unknown = walk_block(guard, begun(guard), [3, 4, 5, 6], limits())
    assert unknown.error == "what follows is unknown" and unknown.tokens == (3,)
    masks = guard_of({0: [MASK]})
    block = begun(masks)
    assert block.error is not None and f"allows token {MASK} alone" in block.error
    assert walk_block(masks, block, [-1] * SIZE, limits()).error == block.error


def test_a_token_that_was_drawn_with_another_mask_is_noticed():
    guard = guard_of({0: [5]})
    with pytest.raises(AssertionError, match="drawn with a mask is refused"):
        walk_block(guard, Block(8, (), 0, guard.start), [6, -1, -1, -1], limits())
