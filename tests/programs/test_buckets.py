"""Steps come in few shapes, and every step that the limits allow has one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.programs.buckets import Buckets

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
    most, seats = buckets.max_num_batched_tokens, buckets.max_num_seqs
    decode_rows = draw(st.integers(0, min(seats, most) - 1))
    budget = most - decode_rows
    rows = range(1, min(seats - decode_rows, budget) + 1)
    prefill_rows = draw(st.sampled_from([rows for rows in rows if buckets.prefill_room(decode_rows, rows) >= rows]))
    room = min(budget, buckets.prefill_room(decode_rows, prefill_rows))
    return {
        "decode_rows": decode_rows,
        "prefill_rows": prefill_rows,
        "prefill_tokens": draw(st.integers(prefill_rows, room)),
        "pages_per_row": draw(st.integers(1, buckets.pages_per_row[-1])),
    }


@st.composite
def parts_of(draw, step: dict[str, int]):
    """A step that is nowhere larger."""
    rows = draw(st.integers(1, step["prefill_rows"]))
    return {
        "decode_rows": draw(st.integers(0, step["decode_rows"])),
        "prefill_rows": rows,
        "prefill_tokens": draw(st.integers(rows, step["prefill_tokens"])),
        "pages_per_row": draw(st.integers(1, step["pages_per_row"])),
    }


@given(data=st.data())
def test_every_step_within_the_limits_has_a_shape_that_holds_it(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    step = data.draw(steps(buckets))
    shape = buckets.shape_for(**step)
    assert all(getattr(shape, name) >= value for name, value in step.items())
    assert step["decode_rows"] + step["prefill_rows"] <= shape.num_logits <= buckets.max_num_seqs


def test_no_shape_has_more_decode_rows_than_there_are_requests():
    buckets = Buckets.from_limits(max_num_seqs=16, max_num_batched_tokens=80, max_model_len=1, page_size=1)
    assert max(shape.decode_rows for shape in buckets.all_steps()) == 16
    few, more = ({"decode_rows": 5, "prefill_rows": n, "prefill_tokens": 17, "pages_per_row": 1} for n in (1, 5))
    assert buckets.shape_for(**few).num_tokens <= buckets.shape_for(**more).num_tokens


@given(data=st.data())
def test_a_step_that_is_no_smaller_has_a_shape_that_is_no_smaller(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    large = data.draw(steps(buckets))
    small = data.draw(parts_of(large))
    one, other = buckets.shape_for(**small), buckets.shape_for(**large)
    assert one.num_tokens <= other.num_tokens and one.pages_per_row <= other.pages_per_row


@given(data=st.data())
def test_the_largest_number_of_prefill_tokens_leaves_room_for_the_decodes_beside_it(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    *fewer, most = buckets.prefill_tokens
    for shape in buckets.all_steps():
        assert shape.num_tokens <= most or shape.prefill_tokens in fewer or not fewer


@given(data=st.data())
def test_there_is_room_for_a_prefill_beside_any_decodes(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    most, seats = buckets.max_num_batched_tokens, buckets.max_num_seqs
    assert all(buckets.prefill_room(rows, 1) >= min(16, most) for rows in range(seats))
    assert buckets.prefill_room(seats + 1000, 1) == 0 == buckets.prefill_room(0, most + 1000)


@given(data=st.data())
def test_every_shape_of_a_step_is_among_all_shapes(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    shapes = buckets.all_steps()
    assert buckets.shape_for(**data.draw(steps(buckets))) in shapes
    assert len(set(shapes)) == len(shapes)


@given(data=st.data())
def test_every_decode_loop_within_the_limits_has_a_shape_among_all_loops(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    loop = {
        "decode_rows": data.draw(st.integers(1, buckets.max_num_seqs)),
        "pages_per_row": data.draw(st.integers(1, buckets.pages_per_row[-1])),
    }
    shape, loops = buckets.loop_for(**loop), buckets.all_loops()
    assert all(getattr(shape, name) >= value for name, value in loop.items())
    assert shape.prefill_rows == shape.prefill_tokens == 0 and shape.num_logits == shape.decode_rows
    assert shape in loops and len(set(loops)) == len(loops)
    assert shape.decode_rows <= min(rows for rows in buckets.decode_rows if rows >= loop["decode_rows"])


@pytest.mark.parametrize(
    ("max_num_seqs", "rows"),
    [
        (1, [1]),
        (16, [1, 2, 4, 8, 16]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 32]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
        (48, [1, 2, 4, 8, 16, 32, 48]),
        (256, [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]),
    ],
)
def test_loops_have_a_number_of_rows_between_powers_of_two(max_num_seqs, rows):
    assert Buckets.from_limits(**{**DEFAULT, "max_num_seqs": max_num_seqs}).loop_rows(256) == rows


def test_with_long_page_tables_loops_have_powers_of_two_of_rows():
    buckets = Buckets.from_limits(**{**DEFAULT, "max_model_len": 131072})
    assert buckets.loop_rows(2048) != buckets.decode_rows == buckets.loop_rows(8192)


def test_the_default_limits_have_28_shapes_with_prefills():
    shapes = Buckets.from_limits(**DEFAULT).all_steps()
    assert len(shapes) == 28 and max(shape.num_tokens for shape in shapes) == 2048


@pytest.mark.parametrize(
    ("decodes", "tokens", "shape"),
    [(0, 9, (4, 16)), (1, 300, (32, 384)), (33, 50, (128, 128)), (200, 50, (256, 64)), (3, 2000, (4, 2044))],
)
def test_the_smallest_shape_is_taken(decodes, tokens, shape):
    buckets = Buckets.from_limits(**DEFAULT)
    found = buckets.shape_for(decode_rows=decodes, prefill_rows=1, prefill_tokens=tokens, pages_per_row=1)
    assert (found.decode_rows, found.prefill_tokens) == shape


def test_steps_compute_about_1_3_times_what_they_need():
    """A prompt in each step, log-normal with a median of 250 tokens, beside 0 to 200 decodes."""
    buckets = Buckets.from_limits(**DEFAULT)
    rng = np.random.default_rng(0)
    decodes = rng.integers(0, 201, 500).tolist()
    prompts = np.clip(rng.lognormal(np.log(250), 0.8, 500), 1, 1500).astype(int).tolist()
    padded = sum(
        buckets.shape_for(decode_rows=rows, prefill_rows=1, prefill_tokens=tokens, pages_per_row=1).num_tokens
        for rows, tokens in zip(decodes, prompts, strict=True)
    )
    assert padded < 1.305 * (sum(decodes) + sum(prompts))


@given(data=st.data())
def test_steps_of_prompts_alone_have_shapes_among_all_chunks(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    step = data.draw(steps(buckets))
    chunks = buckets.all_chunks()
    assert buckets.shape_for(**{**step, "decode_rows": 0}) in chunks and set(chunks) <= set(buckets.all_steps())


@given(data=st.data())
def test_hidden_states_of_every_step_have_a_size_and_every_size_has_a_step(data):
    buckets = Buckets.from_limits(**data.draw(limits()))
    counts = [shape.num_tokens for shape in buckets.all_steps()]
    sizes = buckets.hidden_sizes
    assert len(sizes) <= 2 and max(counts) <= sizes[-1]
    assert set(sizes) == {min(size for size in sizes if size >= count) for count in counts}


@pytest.mark.parametrize(
    ("max_model_len", "pages"),
    [
        (100, (7,)),
        (4096, (256,)),
        (8192, (512,)),
        (32768, (2048,)),
        (40960, (2560,)),  # 2048 is too near
        (131072, (2048, 8192)),
        (262144, (2048, 16384)),
    ],
)
def test_long_contexts_have_a_number_of_pages_for_about_every_factor_of_eight(max_model_len, pages):
    assert Buckets.from_limits(**{**DEFAULT, "max_model_len": max_model_len}).pages_per_row == pages


@pytest.mark.parametrize(
    ("excess", "message"),
    [
        ({"decode_rows": 257}, "257 decode rows and 16 prefill tokens .* exceed the limits"),
        ({"prefill_tokens": 2045}, "2045 prefill tokens .* exceed the limits"),
        ({"prefill_rows": 129, "prefill_tokens": 258}, "258 prefill tokens in 129 rows exceed the limits"),
        ({"pages_per_row": 257}, "pages_per_row=257 exceeds .* 256"),
    ],
)
def test_a_step_beyond_the_limits_is_refused(excess, message):
    buckets = Buckets.from_limits(**DEFAULT)
    step = {"decode_rows": 1, "prefill_rows": 1, "prefill_tokens": 16, "pages_per_row": 1, **excess}
    with pytest.raises(ValueError, match=message):
        buckets.shape_for(**step)


@pytest.mark.parametrize(
    ("excess", "message"),
    [
        ({"decode_rows": 257}, "decode_rows=257 exceeds .* 256"),
        ({"pages_per_row": 257}, "pages_per_row=257 exceeds .* 256"),
    ],
)
def test_a_decode_loop_beyond_the_limits_is_refused(excess, message):
    with pytest.raises(ValueError, match=message):
        Buckets.from_limits(**DEFAULT).loop_for(**{"decode_rows": 1, "pages_per_row": 1, **excess})


def test_a_shape_is_the_same_object_wherever_it_is_asked_for():
    buckets = Buckets.from_limits(**DEFAULT)
    found = buckets.shape_for(decode_rows=3, prefill_rows=2, prefill_tokens=40, pages_per_row=3)
    assert any(found is shape for shape in buckets.all_steps())
    loop = buckets.loop_for(decode_rows=3, pages_per_row=3)
    assert any(loop is shape for shape in buckets.all_loops())
