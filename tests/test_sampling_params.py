"""Sampling parameters are refused where they are made, naming the field and the value."""

import re

import pytest

from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = ("1", None, True, [1])
BAD = {
    "n": (0, -1, 1.5, NAN, *NO_NUMBERS),
    "temperature": (-0.1, NAN, INF, *NO_NUMBERS),
    "top_p": (0, -0.1, 1.01, NAN, *NO_NUMBERS),
    "top_k": (-2, 1.5, NAN, *NO_NUMBERS),
    "min_p": (-0.1, 1.01, NAN, *NO_NUMBERS),
    "seed": ("1", 1.5, True, 2**64, -(2**64)),
    "presence_penalty": (-2.1, 2.1, NAN, *NO_NUMBERS),
    "frequency_penalty": (-2.1, 2.1, NAN, *NO_NUMBERS),
    "repetition_penalty": (0, -1.0, INF, NAN, *NO_NUMBERS),
    "min_tokens": (-1, 17, 1.5, *NO_NUMBERS),
    "max_tokens": (0, -5, 1.5, "7", True),
    "stop": (5, "", [""], ["a", 3], [None], b"x"),
    "stop_token_ids": (5, "12", [-1], [1.5], ["1"], [True], {"a": 1}),
    "logprobs": (-1, 21, 1.5, "2", True),
    "prompt_logprobs": (-1, 21, 1.5, "2", True),
    "allowed_token_ids": (5, [], [-1], ["1"], "12"),
    "logit_bias": ([1], {1: "a"}, {"1": 1.0}, {1: 101}, {1: NAN}, {-1: 1.0}, 5),
    "bad_words": ("word", [""], [3], 5),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_field_and_value(field, value):
    with pytest.raises(ValueError, match=rf"^{field} must .*got {re.escape(repr(value))}$"):
        SamplingParams(**{field: value})


GOOD = {
    "n": (1, 8),
    "temperature": (0, 0.0, 1e-6, 2.0, 100),
    "top_p": (1e-6, 0.5, 1, 1.0),
    "top_k": (-1, 0, 1, 10**6),
    "min_p": (0, 0.05, 1),
    "seed": (None, 0, -5, 2**63, 2**64 - 1),
    "presence_penalty": (-2, 0.5, 2),
    "frequency_penalty": (-2, 0.5, 2),
    "repetition_penalty": (0.1, 1, 3.0),
    "min_tokens": (0, 16),
    "max_tokens": (1, 10**6, None),
    "stop": (None, "a", ["a", "b"], ("a",), []),
    "stop_token_ids": (None, [], [1, 2], (3,)),
    "logprobs": (None, 0, 20),
    "allowed_token_ids": (None, [1, 2]),
    "logit_bias": (None, {}, {3: -100, 4: 100.0}, dict.fromkeys(range(320), 1.0)),
    "bad_words": (None, [], ["word"]),
    "structured_outputs": (None, StructuredOutputsParams(regex="a")),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
def test_a_value_at_the_edge_of_what_is_allowed_is_accepted(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_more_minimum_than_maximum_tokens_are_refused_naming_both():
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_a_bias_of_more_tokens_than_a_seat_has_room_for_is_refused():
    with pytest.raises(ValueError, match="logit_bias must have at most 320 tokens, got 321"):
        SamplingParams(logit_bias=dict.fromkeys(range(321), 1.0))


def test_stop_strings_without_text_are_refused():
    with pytest.raises(ValueError, match=r"stop='end' needs detokenize=True"):
        SamplingParams(stop="end", detokenize=False)


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b"))])
def test_stop_strings_are_kept_as_a_tuple(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_the_defaults_are_those_of_the_documentation():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos, params.seed) == (16, 0, False, None)


def test_parameters_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_a_generation_config_gives_defaults_below_what_the_user_gave():
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]}
    params = SamplingParams.from_generation_config(config, top_p=0.5, max_tokens=9)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.5, 20, 9)


def test_a_generation_config_without_sampling_is_greedy_unless_the_user_says_otherwise():
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).temperature == 0
    assert SamplingParams.from_generation_config({"do_sample": False}, temperature=0.8).temperature == 0.8


def test_fields_that_a_generation_config_leaves_empty_keep_their_defaults():
    assert SamplingParams.from_generation_config({"temperature": None, "top_p": None}) == SamplingParams()


def test_a_bad_value_in_a_generation_config_is_refused():
    with pytest.raises(ValueError, match="top_p must .*got 7"):
        SamplingParams.from_generation_config({"top_p": 7})


def test_skipping_the_prefix_cache_is_yes_or_no():
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache


@pytest.mark.parametrize(
    "name",
    ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "skip_reading_prefix_cache"],
)
@pytest.mark.parametrize("value", [1, "no", None])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {value!r}"):
        SamplingParams(**{name: value})
