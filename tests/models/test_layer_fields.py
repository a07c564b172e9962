"""Layers of each family have the windows, heads, keys and MLPs that the family's rule gives them; windows of Qwen's
families are in `test_windows.py`, rotations in `test_family_ropes.py`."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig
from tests.models.layer_patterns import FULL, pattern_of, read, refusal, types

# Family, its fields, which layers slide, and the window. Absent fields have the defaults of transformers' class.
WINDOWS: list[tuple[str, dict[str, Any], str, int | None]] = [
    ("mistral", {}, "SSSSS", 4096),
    ("mistral", {"sliding_window": None}, "FFFFF", None),
    ("mistral", {"sliding_window": 64}, "SSSSS", 64),
    ("mistral", {"layer_types": None}, "SSSSS", 4096),
    ("mistral", {"layer_types": types("FSSSS")}, "FSSSS", 4096),
    ("mistral", {"layer_types": types("FFFFF")}, "FFFFF", None),
    ("mistral", {"layer_types": types("SFSSF"), "sliding_window": 64}, "SFSSF", 64),
    ("ministral", {"layer_types": types("SFSSF"), "sliding_window": 64}, "SFSSF", 64),
    ("ministral", {"sliding_window": None}, "FFFFF", None),
    *((name, {}, "FFFFF", None) for name in ("phi3", "mixtral", "ministral3")),
    *((name, {"sliding_window": 64}, "SSSSS", 64) for name in ("phi3", "mixtral", "ministral3")),
    *((name, {"sliding_window": 64, "layer_types": types("SSSSS")}, "SSSSS", 64) for name in ("phi3", "mixtral")),
    ("phi3", {"layer_types": types("FFFFF")}, "FFFFF", None),
    ("gemma2", {}, "SFSFS", 4096),
    ("gemma2", {"sliding_window": 64, "layer_types": types("FFSSF")}, "FFSSF", 64),
    ("gemma2", {"sliding_window": None, "layer_types": types("FFFFF")}, "FFFFF", None),
    ("gpt_oss", {}, "SFSFS", 128),
    ("gpt_oss", {"layer_types": types("FSFSF")}, "FSFSF", 128),
    ("gemma3_text", {"num_hidden_layers": 7}, "SSSSSFS", 4096),
    ("gemma3_text", {"sliding_window_pattern": 2}, "SFSFS", 4096),
    ("gemma3_text", {"sliding_window_pattern": 1}, "FFFFF", None),
    ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": types("SSSSF")}, "SSSSF", 4096),
    ("gemma3_text", {"_sliding_window_pattern": 2, "layer_types": types("SSSSF")}, "SSSSF", 4096),
    ("gemma4_text", {"num_hidden_layers": 8}, "SSSSSFSF", 512),
    ("gemma4_text", {"layer_types": types("FSSSF"), "sliding_window": 64}, "FSSSF", 64),
    ("gemma4_text", {"layer_types": types("SSFSS")}, "SSFSF", 512),  # the last layer is full whatever they say
    ("gemma4_unified_text", {}, "SSSSF", 1024),
    ("olmo3", {}, "SSSFS", 4096),
    ("olmo3", {"layer_types": types("FSFSS"), "sliding_window": 64}, "FSFSS", 64),
    ("exaone4", {}, "SSSFS", 4096),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "SSSFS", 4096),
    ("exaone4", {"sliding_window_pattern": "LG"}, "SFSFS", 4096),
    ("exaone4", {"sliding_window_pattern": 3}, "SSFSS", 4096),
    ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": types("FFSSS")}, "FFSSS", 4096),
    ("exaone4", {"sliding_window_pattern": None, "layer_types": types("FFSSS")}, "FFSSS", 4096),
    ("exaone4", {"sliding_window": None}, "FFFFF", None),
    ("exaone4", {"sliding_window": None, "sliding_window_pattern": None, "layer_types": types("FFFFF")}, "FFFFF", None),
    ("muse_glimmer_text", {}, "FSSSF", 2048),
    ("muse_glimmer_text", {"num_hidden_layers": 4}, "SSSF", 2048),
    ("muse_glimmer_text", {"layer_types": types("SSSSF"), "sliding_window": 64}, "SSSSF", 64),
    ("laguna", {}, "FFFFF", None),
    ("laguna", {"layer_types": types("FSSSF")}, "FSSSF", 512),
    ("smollm3", {}, "FFFFF", None),
    ("smollm3", {"sliding_window": 64, "layer_types": types("FFFFF")}, "FFFFF", None),
]


@pytest.mark.parametrize(("model_type", "fields", "pattern", "window"), WINDOWS)
def test_layers_have_the_windows_that_their_familys_rule_gives_them(model_type, fields, pattern, window):
    config = read(model_type, **({"num_hidden_layers": 5} | fields))
    assert pattern_of(config) == pattern
    assert {layer.window for layer in config.all_layers} - {None} == ({window} if "S" in pattern else set())
    assert config.has_windows is ("S" in pattern)


BY_TYPE = (
    "mistral", "ministral3", "phi3", "mixtral", "gemma2", "gpt_oss", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "olmo3", "exaone4", "muse_glimmer_text", "laguna", "smollm3", "qwen2", "qwen3", "qwen2_moe",
)  # fmt: skip


@pytest.mark.parametrize("model_type", BY_TYPE)
@pytest.mark.parametrize(
    ("found", "message"),
    [
        (types("FF"), "layer_types to a list of 3 types, got ['full_attention', 'full_attention']"),
        ("full_attention", "layer_types to a list of 3 types, got 'full_attention'"),
        ([FULL, "chunked_attention", FULL], "layer_types contains chunked_attention; full_attention and"),
        ([FULL, None, 3], "layer_types contains 3, None; full_attention and sliding_attention are supported"),
    ],
)
def test_layer_types_that_are_wrong_are_refused(model_type, found, message):
    assert message in refusal(model_type, num_hidden_layers=3, layer_types=found)


@pytest.mark.parametrize("model_type", sorted(set(BY_TYPE) - {"smollm3", "qwen2", "qwen3", "qwen2_moe", "exaone4"}))
@pytest.mark.parametrize("found", [0, -1, "64", True, 64.0])
def test_windows_that_are_no_sizes_are_refused(model_type, found):
    message = refusal(model_type, num_hidden_layers=3, layer_types=types("SSS"), sliding_window=found)
    assert f"sliding_window to a positive integer, got {found!r}" in message


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss", "gemma3_text", "olmo3", "muse_glimmer_text"])
def test_layers_that_slide_need_a_window(model_type):
    fields = {"num_hidden_layers": 3, "layer_types": types("FSF"), "sliding_window": None}
    assert "layers have a window by layer_types, but sliding_window is not set" in refusal(model_type, **fields)


@pytest.mark.parametrize("model_type", ["phi3", "mixtral", "ministral3"])
@pytest.mark.parametrize(("pattern", "window"), [("SFF", 64), ("FFF", 64), ("SSS", None), ("FSS", None)])
def test_layer_types_that_a_family_does_not_read_may_not_contradict_the_window(model_type, pattern, window):
    message = refusal(model_type, num_hidden_layers=3, layer_types=types(pattern), sliding_window=window)
    assert message == "layer_types differ from sliding_window, which is for all layers of this family"


def test_windows_of_smollm3_are_refused_by_name():
    message = refusal("smollm3", num_hidden_layers=3, layer_types=types("FSF"), sliding_window=64)
    assert "layer_types contains sliding_attention, which is not supported" in message
    assert "use_sliding_window=True is not supported" in refusal("smollm3", use_sliding_window=True, sliding_window=64)


@pytest.mark.parametrize("found", [0, "", None, -4])
@pytest.mark.parametrize("model_type", ["gemma3_text", "exaone4"])
def test_a_pattern_that_is_none_is_refused_by_name(model_type, found):
    assert "sliding_window_pattern" in refusal(model_type, sliding_window_pattern=found)


# Laguna: numbers of query heads by layer.
def test_query_heads_of_laguna_are_numbered_by_layer():
    fields = {"num_hidden_layers": 4, "num_attention_heads": 48, "layer_types": types("FSSF")}
    config = read("laguna", **fields, num_attention_heads_per_layer=[48, 72, 64, 48])
    assert [layer.num_heads for layer in config.layers] == [48, 72, 64, 48]
    assert [layer.group_size for layer in config.layers] == [6, 9, 8, 6]
    assert [layer.num_heads for layer in read("laguna", **fields).layers] == [48] * 4
    assert len(config.kinds) == 3


@pytest.mark.parametrize("found", [[48], [48, 0], [48, "48"], 48])
def test_query_heads_of_laguna_that_are_wrong_are_refused(found):
    message = refusal("laguna", num_hidden_layers=2, num_attention_heads_per_layer=found)
    assert f"num_attention_heads_per_layer to 2 positive integers, got {found!r}" in message
    assert "num_attention_heads=49 must be a multiple of num_key_value_heads=8" in refusal(
        "laguna", num_hidden_layers=2, num_attention_heads_per_layer=[48, 49]
    )


# Gemma 4: heads of full layers, keys that are values, keys and values of earlier layers.
WIDE: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": types("SFF"), "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256,
}  # fmt: skip


def heads(config: ModelConfig) -> list[tuple[int, int, bool]]:
    """Key/value heads and head size of every layer, and whether its values are its keys."""
    return [(layer.num_kv_heads, layer.head_dim, layer.values_are_keys) for layer in config.all_layers]


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_full_layers_of_gemma_4_have_heads_of_their_own_in_either_format(model_type):
    own = {"head_dim": 512, "num_key_value_heads": 2}
    older = read(model_type, **WIDE, attention_k_eq_v=True, global_head_dim=512, num_global_key_value_heads=2)
    newer = read(model_type, **WIDE, attention_k_eq_v=True, per_layer_config={"1": own, "2": own})
    assert older == newer and (older.num_kv_heads, older.head_dim) == (8, 256)
    assert heads(older) == [(8, 256, False), (2, 512, True), (2, 512, True)]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, [(8, 256, False), (8, 512, False), (8, 512, False)]),
        ({"global_head_dim": 128}, [(8, 256, False), (8, 128, False), (8, 128, False)]),
        # Without shared values the global number of heads does not count.
        ({"num_global_key_value_heads": 2}, [(8, 256, False), (8, 512, False), (8, 512, False)]),
        ({"attention_k_eq_v": True}, [(8, 256, False), (8, 512, True), (8, 512, True)]),
        # What the newer field does not name is common, and the older ones do not count beside it.
        ({"per_layer_config": {}, "global_head_dim": 128}, [(8, 256, False)] * 3),
        ({"per_layer_config": {"2": {"num_key_value_heads": 4}}}, [(8, 256, False), (8, 256, False), (4, 256, False)]),
    ],
)
def test_heads_of_full_layers_of_gemma_4(fields, found):
    assert heads(read("gemma4_text", **WIDE, **fields)) == found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([{"head_dim": 512}], "per_layer_config must be an object, got [{'head_dim': 512}]"),
        ({"3": {"head_dim": 512}}, "per_layer_config must map numbers of layers to fields, got '3'"),
        ({"full_attention": {"head_dim": 512}}, "must map numbers of layers to fields, got 'full_attention'"),
        ({"1": 512}, "per_layer_config must map numbers of layers to fields, got '1'"),
        ({"1": {"intermediate_size": 64}}, "per_layer_config sets intermediate_size, which is not supported"),
        ({"0": {"head_dim": 512}}, "per_layer_config sets layer 0, which has a window: not supported"),
        ({"1": {"head_dim": 0}}, "head_dim to a positive integer, got 0"),
        ({"1": {"num_key_value_heads": 5}}, "num_attention_heads=16 must be a multiple of num_key_value_heads=5"),
    ],
)
def test_heads_of_full_layers_that_are_wrong_are_refused(found, message):
    assert message in refusal("gemma4_text", **WIDE, per_layer_config=found)


SHARING: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": types("SFSSSF"), "intermediate_size": 96}


@pytest.mark.parametrize("is_wide", [True, False])
def test_the_last_layers_of_gemma_4_read_keys_of_the_last_earlier_layer_of_their_type(is_wide):
    config = read("gemma4_text", **SHARING, num_kv_shared_layers=3, use_double_wide_mlp=is_wide, attention_k_eq_v=True)
    assert [layer.kv_from for layer in config.layers] == [None, None, None, 2, 2, 1]
    assert [layer.is_read_later for layer in config.layers] == [False, True, True, False, False, False]
    assert [layer.values_are_keys for layer in config.layers] == [False, True, False, False, False, False]
    assert [layer.mlp_size for layer in config.layers] == [None] * 3 + [192 if is_wide else None] * 3
    assert config.kv_layers == config.layers[:3]


def test_layers_that_share_none_have_no_wide_mlp():
    config = read("gemma4_text", **SHARING, use_double_wide_mlp=True)
    assert {(layer.kv_from, layer.is_read_later, layer.mlp_size) for layer in config.layers} == {(None, False, None)}


@pytest.mark.parametrize("count", [5, 6, 7])
def test_keys_of_no_earlier_layer_are_refused_by_name(count):
    message = refusal("gemma4_text", **SHARING, num_kv_shared_layers=count)
    assert f"num_kv_shared_layers={count} leaves no layer of some type to read keys from" in message


def test_a_number_of_sharing_layers_that_is_none_is_refused_by_name():
    assert "num_kv_shared_layers to an integer of at least 0" in refusal("gemma4_text", num_kv_shared_layers=-1)


@pytest.mark.parametrize(("count", "pattern"), [(2, "SS"), (6, "SSSFSS"), (10, "SSSFSSSSFS")])
def test_a_model_of_other_depth_repeats_the_layers(count, pattern):
    config = read("olmo3", num_hidden_layers=5).with_num_layers(count)
    assert pattern_of(config) == pattern and config.num_layers == count
