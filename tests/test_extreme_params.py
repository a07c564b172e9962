"""What `SamplingParams` and the engine's input accept, steps accept: whatever the numbers are, tokens come out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.core import EngineCore
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.tokenizer import Tokenizer
from tests.builders import make_engine, model_config, random_model
from tests.tiny_checkpoints import token_id, vocab_size, write_tokenizer

VOCAB, MAX_LEN, EOS = 101, 14, 7
INTS = [0, 1, 3, -1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, 10**40, -(2**63)]
INTS += [np.int8(5), np.uint8(255), np.int32(2**31 - 1), np.int64(-1), np.uint64(2**64 - 1)]
FLOATS = [0.0, 0.7, 1.0, 1, 2.0, 5e-324, 1e-45, 1e-40, 1.2e-38, 1e-30, 1 - 1e-9, 1e30, 1e38, 3.5e38, 1e39, 10**400]
FLOATS += [float("nan"), float("inf"), -1e-9, np.float16(0.5), np.float32(1e-45), np.float64(0.9), np.int8(1)]
TOKENS = [1, 5, VOCAB - 1, np.int64(9), np.uint8(3), EOS]
tokens = st.lists(st.sampled_from([*TOKENS, *TOKENS, VOCAB, 2**31, 2**70]), max_size=4)
ints, floats = st.sampled_from(INTS), st.sampled_from(FLOATS)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), floats),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), floats),
    **dict.fromkeys(("top_k", "seed", "min_tokens"), ints),
    "max_tokens": st.one_of(st.none(), ints),
    "n": st.sampled_from([1, 2, np.int8(2), 0, 2**40]),
    "logprobs": st.sampled_from([None, 0, np.int8(2), 21]),
    "stop_token_ids": tokens,
    "allowed_token_ids": tokens | st.just(np.asarray([4, 5, 6])),
    "logit_bias": st.dictionaries(st.sampled_from(TOKENS), st.sampled_from([-100, np.float32(3), 100.0, 1e-45, 101])),
    "ignore_eos": st.booleans(),
}


@st.composite
def some_fields(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(list(FIELDS)), max_size=5, unique=True))
    return {name: draw(FIELDS[name]) for name in names}


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return make_engine(random_model(model_config()), max_model_len=MAX_LEN, max_num_seqs=2, max_num_batched_tokens=16)


def processor_of(core: EngineCore) -> InputProcessor:
    return InputProcessor(core.config, core.model_config, {"eos_token_id": EOS}, None)


def run(core: EngineCore, request: Any) -> list[Request]:
    members = [request] if isinstance(request, Request) else request.members
    (core.add_request if isinstance(request, Request) else core.add_group)(request)
    for _ in range(100):
        if not core.has_unfinished_requests():
            core.step()
            return members
        core.step()
    raise AssertionError("it does not end")


accepted: list[bool] = []


@settings(max_examples=120)
@given(some_fields())
def test_what_is_accepted_generates_tokens_of_the_vocabulary(core, fields):
    try:
        params = SamplingParams(**fields)
        (request,) = processor_of(core).requests([[3, 1, 4]], params, stream=False)
    except ValueError:
        accepted.append(False)
        return
    accepted.append(True)
    for member in run(core, request):
        assert member.is_finished and member.status.value in ("stop", "length") and member.output_token_ids
        assert all(0 <= token < VOCAB for token in member.output_token_ids)
        allowed = params.allowed_token_ids
        assert allowed is None or set(member.output_token_ids) <= set(allowed)
    core.check_integrity()


def test_enough_of_what_was_tried_was_accepted_and_enough_refused():
    if accepted:  # the test before has run in this process
        assert 30 < sum(accepted) < len(accepted) - 15


def test_values_are_kept_as_pythons_own_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1), max_tokens=np.int8(100),
        stop_token_ids=np.asarray([3, 4]), allowed_token_ids=(token for token in (5, 6)), logit_bias={np.int64(1): 2},
    )  # fmt: skip
    assert [type(x) for x in (params.temperature, params.top_k, params.seed, params.max_tokens)] == [float, *[int] * 3]
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias) == ([3, 4], [5, 6], {1: 2.0})


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-39])
def test_a_temperature_that_float32_does_not_tell_from_0_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).temperature == 0.0
    assert SamplingParams(temperature=1.2e-38).temperature == 1.2e-38


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 1e39), ("repetition_penalty", 1e39), ("repetition_penalty", 1e-31), ("n", 2**14 + 1)],
)
def test_numbers_that_float32_or_memory_does_not_hold_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be (a number|an integer) in \[.*\], got "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("top_k", [VOCAB, 2**31, 10**40])
def test_top_k_beyond_the_vocabulary_is_off(core, top_k):
    (request,) = processor_of(core).requests([[1]], SamplingParams(top_k=top_k), stream=False)
    assert isinstance(request, Request) and request.sampling_params.top_k == 0
    (request,) = processor_of(core).requests([[1]], SamplingParams(top_k=VOCAB - 1), stream=False)
    assert isinstance(request, Request) and request.sampling_params.top_k == VOCAB - 1


def test_samples_of_the_greatest_seed_go_round(core):
    (group,) = processor_of(core).requests([[1]], SamplingParams(n=2, seed=2**64 - 1), stream=False)
    assert not isinstance(group, Request)
    assert [member.request_key for member in group.members] == [(2**32 - 1, 2**32 - 1), (0, 0)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": [EOS], "min_tokens": 3}, r"allowed_token_ids=\[7\] and min_tokens=3"),
        ({"allowed_token_ids": [5, 9], "stop_token_ids": [9, 5], "min_tokens": 1}, r"allowed_token_ids=.* and min_to"),
        ({"stop_token_ids": list(range(VOCAB)), "min_tokens": 1}, "prompt 0: min_tokens=1 leave no token"),
    ],
)
def test_what_bars_every_token_is_refused_by_name(core, fields, named):
    with pytest.raises(ValueError, match=named):
        processor_of(core).requests([[1]], SamplingParams(**fields), stream=False)


def test_what_leaves_a_token_is_accepted(core):
    for params in (
        SamplingParams(allowed_token_ids=[EOS]),
        SamplingParams(allowed_token_ids=[EOS, 5], min_tokens=3),
        SamplingParams(allowed_token_ids=[EOS], min_tokens=3, ignore_eos=True),
    ):
        processor_of(core).requests([[1]], params, stream=False)


def test_allowed_tokens_that_are_all_bad_words_are_refused_by_name(core, tmp_path):
    write_tokenizer(tmp_path)
    config = replace(core.model_config, vocab_size=vocab_size())
    processor = InputProcessor(core.config, config, {}, Tokenizer(tmp_path))
    x, the = token_id("x"), token_id("the")
    params = SamplingParams(allowed_token_ids=[x, the], bad_words=["x", "the"])
    with pytest.raises(ValueError, match=r"prompt 0: allowed_token_ids=.* and bad_words=\['x', 'the'\] leave no token"):
        processor.requests([[1]], params, stream=False)
    processor.requests([[1]], replace(params, bad_words=["x"]), stream=False)
