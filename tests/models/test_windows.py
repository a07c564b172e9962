"""Which layers of Qwen's families have a window, as each family's code reads it, and where none may have one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.layer_config import LayerConfig
from tests.models.test_config import QWEN2, QWEN3, tiny
from tests.models.test_sparse_config import QWEN3_30B_A3B

FULL, SLIDING = "full_attention", "sliding_attention"
ON = {"use_sliding_window": True, "sliding_window": 64}
SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "mask_token_id": 99}
DENSE = {"qwen2": tiny(QWEN2), "qwen3": tiny(QWEN3)}  # of two layers
BY_LAYER = DENSE | {"sdar": tiny(QWEN3) | SDAR}
QWEN3_MOE = QWEN3_30B_A3B | {"num_hidden_layers": 2}
QWEN2_MOE: dict[str, Any] = {"architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 5}
FROM_A_NUMBER_ON: list[tuple[dict[str, Any], int]] = [
    (ON | {"max_window_layers": 0}, 2),
    (ON | {"max_window_layers": 1}, 1),
    (ON | {"max_window_layers": 1, "layer_types": None}, 1),
    ({"use_sliding_window": True, "max_window_layers": 1}, 1),  # an absent window is one of 4096
]


def refusal(hf: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(hf)
    return str(error.value)


def windows(hf: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in ModelConfig.from_hf(hf).all_layers]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("fields", "count"), FROM_A_NUMBER_ON)
def test_layers_from_a_number_on_have_windows_in_dense_qwen(name, fields, count):
    plain, found = ModelConfig.from_hf(DENSE[name]), ModelConfig.from_hf(DENSE[name] | fields)
    layer = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=plain.rope)
    windowed = dataclasses.replace(layer, window=fields.get("sliding_window", 4096))
    assert found == dataclasses.replace(plain, layers=(layer,) * (2 - count) + (windowed,) * count)
    assert found.has_windows and not plain.has_windows and plain.layers == ()


@pytest.mark.parametrize("name", DENSE)
def test_layer_types_say_which_layers_have_windows_whatever_the_number_says(name):
    fields = ON | {"max_window_layers": 2, "layer_types": [SLIDING, FULL]}
    assert windows(DENSE[name] | fields) == [64, None]


@pytest.mark.parametrize(("fields", "count"), FROM_A_NUMBER_ON)
def test_windows_of_a_diffusion_model_are_refused_by_name(fields, count):
    window = fields.get("sliding_window", 4096)
    message = f"{count} of 2 layers have a window (sliding_window={window}), which is not supported in diffusion models"
    assert refusal(BY_LAYER["sdar"] | fields) == message
    config = ModelConfig.from_hf(BY_LAYER["sdar"])
    layers = (config.common_layer, dataclasses.replace(config.common_layer, window=64))
    with pytest.raises(UnsupportedConfigError, match=r"1 of 2 layers have a window \(sliding_window=64\)"):
        dataclasses.replace(config, layers=layers)


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


@pytest.mark.parametrize("hf", [*BY_LAYER.values(), QWEN2_MOE | {"num_hidden_layers": 2}])
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 64}, {"use_sliding_window": True, "sliding_window": None}])
def test_layer_types_with_windows_need_the_switch_and_a_window(hf, fields):
    assert "layers have a window by layer_types, but sliding_window is not set" in refusal(
        hf | fields | {"layer_types": [FULL, SLIDING]}
    )


@pytest.mark.parametrize("hf", [QWEN3_MOE, tiny()])
def test_layer_types_with_windows_are_refused_by_name_where_they_are_not_read(hf):
    assert "layer_types contains sliding_attention" in refusal(hf | {"layer_types": [FULL, SLIDING]})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_window_layers": 0}, {"max_window_layers": 1}, {"max_window_layers": 2}, {"max_window_layers": 48},
        {"layer_types": [FULL, FULL]},
    ],
)  # fmt: skip
def test_all_layers_of_qwen3_moe_have_windows_whatever_the_number_says(fields):
    assert windows(QWEN3_MOE | ON | fields) == [64, 64]
    absent = {name: value for name, value in QWEN3_MOE.items() if name != "sliding_window"}
    assert windows(absent | {"use_sliding_window": True} | fields) == [4096, 4096]


@pytest.mark.parametrize(
    "fields", [{"sliding_window": 64}, ON | {"sliding_window": None}, ON | {"use_sliding_window": False}]
)
def test_windows_of_qwen3_moe_that_are_off_are_accepted(fields):
    assert ModelConfig.from_hf(QWEN3_MOE | fields) == ModelConfig.from_hf(QWEN3_MOE)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (ON | {"max_window_layers": 4}, [64, None, 64, None, None]),
        (ON | {"max_window_layers": 3}, [64, None, 64, None, None]),
        (ON | {"max_window_layers": 2}, [64, None, None, None, None]),
        (ON, [64, None, 64, None, 64]),  # an absent number is 28
        ({"use_sliding_window": True}, [4096, None, 4096, None, 4096]),
        (ON | {"max_window_layers": 0}, [None] * 5),
        (ON | {"layer_types": [FULL, SLIDING, FULL, FULL, SLIDING]}, [None, 64, None, None, 64]),
        ({"sliding_window": 64, "max_window_layers": 4}, [None] * 5),
        ({"use_sliding_window": False, "sliding_window": 0}, [None] * 5),  # as newer files say it
    ],
)
def test_even_layers_of_qwen2_moe_below_a_number_have_windows(fields, found):
    assert windows(QWEN2_MOE | fields) == found


def test_a_number_of_layers_that_is_none_is_refused_by_name():
    for hf in (tiny(QWEN2), QWEN2_MOE):
        message = refusal(hf | ON | {"max_window_layers": None})
        assert "max_window_layers to an integer of at least 0, got None" in message
