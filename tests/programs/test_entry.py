"""An entry writes a sequence into its own seat, and changes no other seat."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.backend import select_backend
from jaxinfer.programs.entry import Enters, Entry, EntryShape, PackedEntry
from jaxinfer.programs.program import BOUNDS, SEATS, Device
from jaxinfer.programs.seats import Seats
from jaxinfer.sampling.bounds import Bounds

NUM_SEATS, VOCAB = 5, 70
SHAPE = EntryShape(2, 6, VOCAB)
OF_MASKS, OF_TOKENS = EntryShape(2, 0, VOCAB, Enters.MASK), EntryShape(3, 0, 0, Enters.TOKENS)


def random_state() -> dict:
    rng = np.random.default_rng(0)
    layout = Bounds.layout(NUM_SEATS, VOCAB)
    arrays = {name: jnp.asarray(rng.integers(1, 9, extent).astype(dtype)) for name, (extent, dtype) in layout.items()}
    return {SEATS: Seats(*(start + jnp.arange(NUM_SEATS) for start in (0, 20, 10))), BOUNDS: Bounds(**arrays)}


def run(packed: PackedEntry) -> tuple[dict, dict]:
    """The state before and after, as host arrays."""
    before = random_state()
    program, backend = Entry({packed.shape.holds: packed.shape}), select_backend("xla")

    @jax.jit
    def enter(state: dict, buffer: jax.Array) -> dict:
        return program.run(Device({}, state, backend, None), packed.shape, buffer)[0]

    after = enter(before, jnp.asarray(packed.buffer))
    return jax.tree.map(np.asarray, before), jax.tree.map(np.asarray, after)


@pytest.mark.parametrize("shape", [SHAPE, OF_MASKS, OF_TOKENS])
def test_an_entry_of_nobody_changes_nothing(shape):
    before, after = run(PackedEntry(shape, NUM_SEATS))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_an_entry_writes_its_seat_and_no_other():
    packed = PackedEntry(SHAPE, NUM_SEATS)
    rng = np.random.default_rng(1)
    given = {}
    for name, (extent, dtype) in Bounds.layout(1, VOCAB).items():
        if name != "counts":
            packed[name][1] = given[name] = rng.integers(0, 99, extent[1:]).astype(dtype)
    packed["seat"][1], packed["token"][1], packed["before"][1], packed["length"][1] = 3, 44, 33, 55
    packed["count_of"][:3], packed["count_token"][:3], packed["count"][:3] = 1, [2, 69, 0], [7, 65535, 1]
    before, after = run(packed)
    assert (after[SEATS].token[3], after[SEATS].before[3], after[SEATS].length[3]) == (44, 33, 55)
    expected = np.zeros(VOCAB, np.uint16)
    expected[[2, 69, 0]] = 7, 65535, 1
    assert np.array_equal(after[BOUNDS].counts[3], expected)
    for name, value in given.items():
        np.testing.assert_array_equal(getattr(after[BOUNDS], name)[3], value)
    others = [0, 1, 2, 4]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[others], y[others]), before, after)


def test_more_counts_than_fit_are_added_by_another_launch():
    packed = PackedEntry(SHAPE, NUM_SEATS)
    packed["seat"][0], packed["enters"][0] = 2, Enters.COUNTS
    packed["count_of"][0], packed["count_token"][0], packed["count"][0] = 0, 5, 12
    before, after = run(packed)
    assert after[BOUNDS].counts[2, 5] == 12
    expected = before[BOUNDS].counts.copy()
    expected[2, 5] = 12
    np.testing.assert_array_equal(after[BOUNDS].counts, expected)
    np.testing.assert_array_equal(after[BOUNDS].allowed, before[BOUNDS].allowed)
    np.testing.assert_array_equal(after[SEATS].token, before[SEATS].token)


def test_a_length_of_0_leaves_token_and_length_to_the_steps():
    packed = PackedEntry(SHAPE, NUM_SEATS)
    packed["seat"][0], packed["binds"][0] = 2, 1
    before, after = run(packed)
    jax.tree.map(np.testing.assert_array_equal, before[SEATS], after[SEATS])
    assert after[BOUNDS].binds[2] == 1 and not after[BOUNDS].counts[2].any()


def test_a_mask_takes_the_place_of_another_and_nothing_else_changes():
    packed = PackedEntry(OF_MASKS, NUM_SEATS)
    packed["seat"][:] = [4, 1]
    packed["mask"][:], packed["masked_at"][:], packed["masks_list"][:] = 77, [31, 0], [0, 1]
    before, after = run(packed)
    assert (after[BOUNDS].mask[[4, 1]] == 77).all()
    assert after[BOUNDS].masked_at[[4, 1]].tolist() == [31, 0] and after[BOUNDS].masks_list[[4, 1]].tolist() == [0, 1]
    others = [0, 2, 3]
    masks = ("mask", "masked_at", "masks_list")
    for name in masks:
        of_others = (getattr(bounds[BOUNDS], name)[others] for bounds in (before, after))
        np.testing.assert_array_equal(*of_others)
    after[BOUNDS] = replace(after[BOUNDS], **{name: getattr(before[BOUNDS], name) for name in masks})
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_tokens_alone_enter_a_seat_whose_bounds_stay():
    packed = PackedEntry(OF_TOKENS, NUM_SEATS)
    packed["seat"][1] = 3
    packed["token"][1], packed["before"][1], packed["length"][1] = 44, 33, 55
    before, after = run(packed)
    assert (after[SEATS].token[3], after[SEATS].before[3], after[SEATS].length[3]) == (44, 33, 55)
    jax.tree.map(np.testing.assert_array_equal, before[BOUNDS], after[BOUNDS])
