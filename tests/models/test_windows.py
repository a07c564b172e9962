"""Sliding windows that act are refused; which layers have one is read as each family's code reads it."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from tests.models.test_config import QWEN2, QWEN3, tiny
from tests.models.test_sparse_config import QWEN3_30B_A3B

FULL, SLIDING = "full_attention", "sliding_attention"
ON = {"use_sliding_window": True, "sliding_window": 64}
SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "mask_token_id": 99}
BY_LAYER = {"qwen2": tiny(QWEN2), "qwen3": tiny(QWEN3), "sdar": tiny(QWEN3) | SDAR}  # of two layers
QWEN3_MOE = QWEN3_30B_A3B | {"num_hidden_layers": 2}


def refusal(hf: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(hf)
    return str(error.value)


@pytest.mark.parametrize("name", BY_LAYER)
@pytest.mark.parametrize(
    ("fields", "count"),
    [
        (ON | {"max_window_layers": 0}, 2),
        (ON | {"max_window_layers": 1}, 1),
        (ON | {"max_window_layers": 1, "layer_types": None}, 1),
        ({"use_sliding_window": True, "max_window_layers": 1}, 1),  # an absent window is one of 4096
    ],
)
def test_layers_from_a_number_on_have_windows_in_dense_qwen(name, fields, count):
    window = fields.get("sliding_window", 4096)
    message = refusal(BY_LAYER[name] | fields)
    assert f"gives {count} of 2 layers" in message and f"sliding_window={window}" in message


@pytest.mark.parametrize("name", BY_LAYER)
@pytest.mark.parametrize(
    "fields",
    [
        ON | {"max_window_layers": 2},
        ON | {"max_window_layers": 28},
        ON,  # an absent number is 28
        ON | {"max_window_layers": 0, "layer_types": [FULL, FULL]},
        ON | {"max_window_layers": 0, "sliding_window": None},
        {"sliding_window": 64, "max_window_layers": 0},
    ],
)
def test_windows_of_no_layer_are_accepted_in_dense_qwen(name, fields):
    assert ModelConfig.from_hf(BY_LAYER[name] | fields) == ModelConfig.from_hf(BY_LAYER[name])


@pytest.mark.parametrize("hf", [*BY_LAYER.values(), QWEN3_MOE, tiny()])
def test_layer_types_with_windows_are_refused_by_name(hf):
    assert "layer_types contains sliding_attention" in refusal(hf | {"layer_types": [FULL, SLIDING]})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_window_layers": 0}, {"max_window_layers": 1}, {"max_window_layers": 2}, {"max_window_layers": 48},
        {"layer_types": [FULL, FULL]},
    ],
)  # fmt: skip
def test_all_layers_of_qwen3_moe_have_windows_whatever_the_number_says(fields):
    message = refusal(QWEN3_MOE | ON | fields)
    assert "gives 2 of 2 layers of Qwen3MoeForCausalLM a window (sliding_window=64)" in message
    absent = {name: value for name, value in QWEN3_MOE.items() if name != "sliding_window"}
    assert "sliding_window=4096" in refusal(absent | {"use_sliding_window": True} | fields)


@pytest.mark.parametrize(
    "fields", [{"sliding_window": 64}, ON | {"sliding_window": None}, ON | {"use_sliding_window": False}]
)
def test_windows_of_qwen3_moe_that_are_off_are_accepted(fields):
    assert ModelConfig.from_hf(QWEN3_MOE | fields) == ModelConfig.from_hf(QWEN3_MOE)


def test_a_number_of_layers_that_is_none_is_refused_by_name():
    assert "max_window_layers to an integer of at least 0, got None" in refusal(
        tiny(QWEN2, **ON, max_window_layers=None)
    )
