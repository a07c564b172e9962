"""Steps come in few shapes, and every step that the limits allow has one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.buckets import Buckets

DEFAULT = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 4096, "page_size": 16}


@st.composite
def limits(draw):
    rows = draw(st.integers(1, 300))
    return {
        "max_num_seqs": rows,
        "max_num_batched_tokens": draw(st.integers(rows, 3000)),
        "max_model_len": draw(st.integers(1, 9000)),
        "page_size": draw(st.sampled_from([1, 4, 16, 64, 256])),
    }


@st.composite
def steps(draw, buckets: Buckets):
    """A step that a scheduler under these limits may choose."""
    most = min(buckets.max_prefill_rows, buckets.max_num_batched_tokens // 2)
    prefill_rows = draw(st.integers(0, most))
    free_rows = min(buckets.max_num_seqs - prefill_rows, buckets.max_num_batched_tokens - 2 * prefill_rows)
    decode_rows = draw(st.integers(0 if prefill_rows else 1, free_rows))
    room = buckets.max_num_batched_tokens - decode_rows
    return {
        "decode_rows": decode_rows,
        "prefill_rows": prefill_rows,
        "prefill_tokens": draw(st.integers(2 * prefill_rows, room)) if prefill_rows else 0,
        "pages_per_row": draw(st.integers(1, buckets.pages_per_row[-1])),
    }


@st.composite
def parts_of(draw, step: dict[str, int]):
    """A step that is nowhere larger, with prefills if that one has any."""
    rows = draw(st.integers(min(1, step["prefill_rows"]), step["prefill_rows"]))
    return {
        "decode_rows": draw(st.integers(0 if rows else 1, step["decode_rows"])),
        "prefill_rows": rows,
        "prefill_tokens": draw(st.integers(2 * rows, step["prefill_tokens"])),
        "pages_per_row": draw(st.integers(1, step["pages_per_row"])),
    }


@given(data=st.data())
def test_every_step_within_the_limits_has_a_shape_that_holds_it(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    step = data.draw(steps(buckets))
    shape = buckets.shape_for(**step)
    assert all(getattr(shape, name) >= value for name, value in step.items())


@given(data=st.data())
def test_a_step_that_is_no_smaller_has_a_shape_that_is_no_smaller(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    large = data.draw(steps(buckets))
    small = data.draw(parts_of(large))
    one, other = buckets.shape_for(**small), buckets.shape_for(**large)
    assert all(getattr(one, name) <= getattr(other, name) for name in small)


def all_shapes(buckets: Buckets, decode_rows, prefill) -> set:
    """Shapes of steps with these decode rows and (rows, tokens) of prefill."""
    return {
        buckets.shape_for(decode_rows=d, prefill_rows=rows, prefill_tokens=tokens, pages_per_row=pages)
        for d in decode_rows
        for rows, tokens in prefill
        for pages in buckets.pages_per_row
        if d + tokens > 0 and d + tokens <= buckets.max_num_batched_tokens and d + rows <= buckets.max_num_seqs
    }


def test_the_default_limits_have_nine_shapes_of_decodes_alone():
    buckets = Buckets.from_limits(**DEFAULT)
    assert len(all_shapes(buckets, range(257), [(0, 0)])) == 9


def test_the_default_limits_have_at_most_25_shapes_with_prefills():
    buckets = Buckets.from_limits(**DEFAULT)
    prefill = [
        (rows, tokens)
        for tokens in (*range(2, 40), 64, 65, 255, 256, 257, 1024, 1025, 2040, 2048)
        for rows in (1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128)
        if 2 * rows <= tokens
    ]
    shapes = all_shapes(buckets, (0, 1, 8, 9, 32, 33, 128, 129, 255), prefill)
    assert 10 < len(shapes) <= 25


def test_long_contexts_add_a_bucket_of_pages_for_every_factor_of_eight():
    counts = [
        len(Buckets.from_limits(**{**DEFAULT, "max_model_len": length}).pages_per_row)
        for length in (100, 4096, 8192, 32768, 262144)
    ]
    assert counts == [1, 1, 2, 2, 3]


def test_biases_come_in_buckets_of_their_own_and_cost_nothing_where_there_are_none():
    buckets = Buckets.from_limits(**DEFAULT)
    step = {"decode_rows": 3, "prefill_rows": 0, "prefill_tokens": 0, "pages_per_row": 1}
    sizes = [buckets.shape_for(**step, num_biases=count).num_biases for count in (0, 1, 64, 65, 512, 513, 5000)]
    assert sizes[0] == 0 and all(
        size >= count for size, count in zip(sizes, (0, 1, 64, 65, 512, 513, 5000), strict=True)
    )
    assert sizes[1] == sizes[2] < sizes[3]


@pytest.mark.parametrize(
    "change",
    [{"decode_rows": 257}, {"prefill_tokens": 2049}, {"pages_per_row": 257}, {"prefill_rows": 129}],
    ids=lambda change: next(iter(change)),
)
def test_a_step_beyond_the_limits_is_refused(change):
    buckets = Buckets.from_limits(**DEFAULT)
    step = {"decode_rows": 1, "prefill_rows": 1, "prefill_tokens": 16, "pages_per_row": 1, **change}
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        buckets.shape_for(**step)
