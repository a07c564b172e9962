"""The plan's figures and its verdict, against figures worked out by hand for Qwen3-8B."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxinfer.checkpoint.directory import read_config
from jaxinfer.config import EngineConfig
from jaxinfer.planning.devices import B200, GPUS, H100, H200, find_gpu
from jaxinfer.planning.plan import Compiled, PlanRequest, make_plan
from jaxinfer.planning.report import verdict

WEIGHTS, PER_TOKEN = 16_381_470_720, 147_456
GIGABYTE = 10**9
# Of 151,936 words with each seat: counts, four sets of bits, 320 biases and eight numbers.
SEAT = 2 * 151_936 + 4 * 4 * 4_748 + 320 * 8 + 8 * 4
LIMIT, RESERVE = 135 * GIGABYTE, 4_050_000_000  # of an H200 at gpu_memory_utilization=0.9


@pytest.fixture
def ask(configs):
    def ask(seqs=64, length=4096, gpu=H200, name="qwen3-8b", page_size=16, budget=2048, **fields) -> PlanRequest:
        engine = EngineConfig(
            max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=budget, page_size=page_size,
            kv_cache_tokens=seqs * -(-length // page_size) * page_size,
        )  # fmt: skip
        return PlanRequest(read_config(configs / name)[1], engine, gpu, jnp.dtype(jnp.bfloat16), **fields)

    return ask


def compiled(temp_bytes: int) -> Compiled:
    return Compiled(temp_bytes, kv_alias_bytes=1, kv_copies=0, host_waits=0, decode_kernels_per_layer=15.0, programs=[])


def test_the_pool_holds_every_sequence_at_full_length_in_whole_pages(ask):
    assert make_plan(ask()).kv_bytes == 64 * 4096 * PER_TOKEN
    assert make_plan(ask(length=4097)).kv_bytes == 64 * 4112 * PER_TOKEN


def test_the_limit_is_the_share_of_the_card_that_is_asked_for(ask):
    assert ask().limit_bytes == LIMIT == 135 * GIGABYTE
    assert ask(gpu_memory_utilization=0.5).limit_bytes == 75 * GIGABYTE


def test_the_limit_is_jax_s_share_where_the_environment_gives_it_less(ask):
    assert ask(jax_memory_share=0.5).limit_bytes == 75 * GIGABYTE
    assert ask(jax_memory_share=0.95).limit_bytes == LIMIT


def test_what_is_not_counted_has_a_reserve_within_the_limit(ask):
    assert make_plan(ask()).reserve_bytes == RESERVE
    assert make_plan(ask(jax_memory_share=0.5)).reserve_bytes == 75 * GIGABYTE * 3 // 100


def test_temporaries_take_from_the_room_for_kv(ask):
    room = LIMIT - RESERVE - WEIGHTS - 64 * SEAT
    assert make_plan(ask()).largest_kv_tokens == room // PER_TOKEN // 16 * 16
    assert make_plan(ask(), compiled(GIGABYTE)).largest_kv_tokens == (room - GIGABYTE) // PER_TOKEN // 16 * 16


def test_it_fits_up_to_the_last_page(ask):
    spare = LIMIT - RESERVE - WEIGHTS - 64 * (4096 * PER_TOKEN + SEAT)
    assert make_plan(ask(), compiled(spare)).fits
    assert not make_plan(ask(), compiled(spare + 1)).fits


def test_the_largest_settings_that_are_named_fit_and_one_more_does_not(ask):
    plan = make_plan(ask(seqs=300))
    assert not plan.fits
    seqs, length = plan.largest_max_num_seqs, plan.largest_max_model_len
    assert make_plan(ask(seqs=seqs)).fits and not make_plan(ask(seqs=seqs + 1)).fits
    assert make_plan(ask(seqs=300, length=length)).fits and not make_plan(ask(seqs=300, length=length + 16)).fits


def test_more_sequences_than_asked_for_are_charged_their_share_of_the_temporaries(ask):
    plan = make_plan(ask(), compiled(GIGABYTE))
    each = 4096 * PER_TOKEN + SEAT + GIGABYTE / 64
    assert plan.largest_max_num_seqs == int((LIMIT - RESERVE - WEIGHTS) / each)


def test_the_largest_settings_stay_within_the_model_and_the_step(ask):
    plan = make_plan(ask(seqs=1, length=64, budget=32))
    assert (plan.largest_max_num_seqs, plan.largest_max_model_len) == (32, 40960)


def test_the_decode_floor_reads_weights_without_the_table_and_all_kv(ask):
    read = WEIGHTS - 2 * 151936 * 4096 + 2 * 64 * 4096 + 64 * 4096 * PER_TOKEN
    assert make_plan(ask()).decode_floor_ms == pytest.approx(1e3 * read / 4.3e12) == pytest.approx(12.51, abs=0.01)


def test_the_decode_floor_of_one_short_sequence_is_that_of_the_weights(ask):
    assert make_plan(ask()).decode_floor_one_sequence_ms == pytest.approx(3.52, abs=0.01)


def test_the_prefill_floor_is_that_of_the_operations_or_of_the_weights(ask):
    assert make_plan(ask()).prefill_floor_ms == pytest.approx(37.58, abs=0.01)
    assert make_plan(ask(seqs=8, budget=8)).prefill_floor_ms == pytest.approx(3.52, abs=0.01)


def test_floors_use_measured_figures_where_there_are_some(ask):
    assert (H200.bandwidth, H200.matmul_rate) == (4.3e12, 790e12)
    assert (H100.bandwidth, H100.matmul_rate) == (3.35e12, 989e12)
    ratio = make_plan(ask(gpu=H100)).decode_floor_ms / make_plan(ask()).decode_floor_ms
    assert ratio == pytest.approx(4.3 / 3.35)


def test_several_gpus_share_weights_and_kv(ask):
    one, four = make_plan(ask()), make_plan(ask(tensor_parallel_size=4))
    assert four.kv_bytes == one.kv_bytes // 4
    assert four.weights_bytes == pytest.approx(one.weights_bytes / 4, rel=1e-3)


def test_a_verdict_names_the_largest_settings(ask):
    fits = verdict(make_plan(ask()), ask())
    assert fits.startswith("fits: 64 sequences of 4096 tokens take 55.04 GB of the 135.00 GB")
    assert "(4.05 GB are kept free)" in fits
    assert "189 such sequences, or 64 of 12128 tokens" in fits
    refused = verdict(make_plan(ask(gpu=H100)), ask(gpu=H100, seqs=65))
    assert refused.startswith(("fits", "does not fit"))
    crowded = ask(gpu=H100, seqs=128)
    text = verdict(make_plan(crowded), crowded)
    assert text.startswith("does not fit: 128 sequences of 4096 tokens would take 93.69 GB of the 76.45 GB")
    assert "Largest that does: 95 sequences of 4096 tokens, or 128 of 3056 tokens." in text


def test_a_verdict_says_when_not_even_one_sequence_fits(ask):
    small = dataclasses.replace(H100, memory_bytes=19_400_000_000)
    request = ask(gpu=small, seqs=256, length=40960)
    assert "Largest that does: 1 sequence of " in verdict(make_plan(request), request)
    tiny = dataclasses.replace(H100, memory_bytes=18 * GIGABYTE)
    plan = make_plan(ask(gpu=tiny))
    assert plan.largest_kv_tokens == plan.largest_max_num_seqs == plan.largest_max_model_len == 0
    assert "the weights leave no room for KV" in verdict(plan, ask(gpu=tiny))


def test_gpus_are_found_by_name_in_any_case():
    assert [find_gpu(name) for name in ("h200", "H100", "B200")] == [H200, H100, B200]
    assert set(GPUS) == {"h200", "h100", "b200"}
    with pytest.raises(ValueError, match="'a1' is not known; known: h200, h100, b200"):
        find_gpu("a1")


@pytest.mark.parametrize("share", [0, 1.5])
def test_a_share_of_memory_out_of_range_is_refused(ask, share):
    with pytest.raises(ValueError, match="gpu_memory_utilization must be"):
        ask(gpu_memory_utilization=share)
