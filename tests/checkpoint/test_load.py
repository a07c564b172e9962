"""Loading: either kind of directory, straight onto its devices, or an error that says what is wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.checkpoint import (
    CheckpointError,
    convert_checkpoint,
    export_hf,
    for_tensor_parallel,
    load_checkpoint,
    read_config,
    read_generation_config,
)
from jaxinfer.checkpoint.tensor_parallel import regrouping
from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.models.config import UnsupportedConfigError
from tests.checkpoint.builders import (
    assert_same_parameters,
    parameters_of,
    random_model,
    tiny_config,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A Hugging Face directory and its conversion; tests that change anything copy first."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "hf")
    convert_checkpoint(folder / "hf", folder / "converted", progress=False)
    return folder


@pytest.fixture
def converted(original, tmp_path) -> Path:
    shutil.copytree(original / "converted", tmp_path / "converted")
    return tmp_path / "converted"


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_directory_may_be_named_by_a_path_that_goes_up(original, monkeypatch):
    (original / "elsewhere").mkdir(exist_ok=True)
    monkeypatch.chdir(original / "elsewhere")
    _, model = load_checkpoint(Path("../converted"))
    _, expected = load_checkpoint(original / "converted")
    assert_same_parameters(parameters_of(model), parameters_of(expected))


def logits(model) -> np.ndarray:
    """What a model says after each of some tokens."""
    positions = jnp.arange(12)
    return np.asarray(jax.jit(lambda ids: model.logits(model(ids, positions, CausalAttend())))(positions % 40))


@pytest.mark.parametrize("kind", ["hf", "converted"])
def test_both_kinds_of_directory_give_the_same_model(original, kind):
    config, model = load_checkpoint(original / kind)
    assert config == dataclasses.replace(tiny_config(), dtype="float32")
    assert_same_parameters(model, random_model(tiny_config()))


@pytest.mark.parametrize("kind", ["hf", "converted"])
def test_a_path_may_be_a_string(original, kind):
    assert load_checkpoint(str(original / kind))[0] == load_checkpoint(original / kind)[0]


@pytest.mark.parametrize("kind", ["hf", "converted"])
@pytest.mark.parametrize("dtype", ["bfloat16", "half", jnp.float32])
def test_parameters_have_the_dtype_that_was_asked_for(original, kind, dtype):
    wanted = jnp.dtype("float16" if dtype == "half" else dtype)
    config, model = load_checkpoint(original / kind, dtype=dtype)
    assert config.dtype == str(wanted)
    found = parameters_of(model)
    for path, values in parameters_of(random_model(tiny_config())).items():
        assert found[path].dtype == wanted
        np.testing.assert_array_equal(found[path], values.astype(wanted))


@pytest.mark.parametrize("kind", ["hf", "converted"])
def test_an_unknown_dtype_is_refused(original, kind):
    with pytest.raises(ValueError, match="dtype='fp8' is not supported; allowed: auto, float32"):
        load_checkpoint(original / kind, dtype="fp8")


def test_without_a_mesh_everything_lies_on_the_default_device(original):
    _, model = load_checkpoint(original / "converted")
    assert model.embed.embedding[...].sharding.device_set == {jax.devices()[0]}


@pytest.mark.parametrize("kind", ["hf", "converted"])
def test_one_device_is_a_mesh_of_one(original, kind):
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    config, model = load_checkpoint(original / kind, mesh=mesh)
    assert_same_parameters(model, random_model(tiny_config()))
    for parameter in parameters(config):
        leaf = model
        for name in parameter.path.split("."):
            leaf = leaf[int(name)] if name.isdigit() else getattr(leaf, name)
        assert leaf[...].sharding == NamedSharding(mesh, parameter.spec)


def test_a_mesh_without_the_axis_is_refused(original):
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    with pytest.raises(ValueError, match=r"must have an axis 'tensor', got axes \('model',\)"):
        load_checkpoint(original / "converted", mesh=mesh)


@pytest.mark.parametrize("kind", ["hf", "converted"])
def test_a_loaded_model_computes(original, kind):
    np.testing.assert_array_equal(logits(load_checkpoint(original / kind)[1]), logits(random_model(tiny_config())))


def test_nothing_at_the_path_is_said_with_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no checkpoint directory at {tmp_path}/nothing"):
        load_checkpoint(tmp_path / "nothing")


def test_a_directory_whose_conversion_did_not_finish_is_refused_with_what_to_do(converted):
    (converted / "jaxinfer.json").unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: .* run the conversion again"):
        load_checkpoint(converted)


def test_a_directory_of_another_format_is_refused(converted):
    edit_json(converted / "jaxinfer.json", format_version=1)
    with pytest.raises(CheckpointError, match="format_version 1, but this engine reads 2"):
        load_checkpoint(converted)


@pytest.mark.parametrize("damage", ["", "{", "[1]"])
@pytest.mark.parametrize("name", ["jaxinfer.json", "config.json"])
def test_a_damaged_json_file_is_named(converted, name, damage):
    (converted / name).write_text(damage)
    with pytest.raises(CheckpointError, match=rf"{name} (is not valid JSON|must hold a JSON object)"):
        load_checkpoint(converted)


def test_a_missing_configuration_is_named(converted):
    (converted / "config.json").unlink()
    with pytest.raises(CheckpointError, match="it has no config.json"):
        load_checkpoint(converted)


def test_missing_weights_are_reported(converted):
    shutil.rmtree(converted / "weights")
    with pytest.raises(CheckpointError, match=r"weights does not hold the parameters .*; convert the source again"):
        load_checkpoint(converted)


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_no_damaged_file_of_the_weights_gives_other_parameters(original, tmp_path, damage):
    weights = original / "converted" / "weights"
    noticed = set()
    # Orbax's descriptions, and what its database has superseded, are not needed; everything else is.
    for number, file in enumerate(sorted(path for path in weights.rglob("*") if path.is_file())):
        shutil.copytree(original / "converted", tmp_path / str(number))
        damaged = tmp_path / str(number) / "weights" / file.relative_to(weights)
        if damage == "cut":
            damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
        else:
            damaged.unlink()
        try:
            _, model = load_checkpoint(tmp_path / str(number))
        except CheckpointError as error:
            assert "convert the source again" in str(error)
            noticed.add(file)
        else:
            assert_same_parameters(model, random_model(tiny_config()))
    largest = max((path for path in weights.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    assert {weights / "manifest.ocdbt", largest} <= noticed


def test_a_lost_chunk_is_not_read_as_zeros(converted):
    database = {"driver": "ocdbt", "base": f"file://{converted}/weights/"}
    store = ts.KvStore.open(database).result()
    assert b"layers.0.mlp.down.kernel/0.0" in store.list().result()
    store.delete_range(ts.KvStore.KeyRange("layers.0.mlp.down.kernel/0", "layers.0.mlp.down.kernel/1")).result()
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.down.kernel in .* is damaged; convert the source again"):
        load_checkpoint(converted)


def test_parameters_of_zeros_come_back_as_zeros(tmp_path):
    config = tiny_config("Qwen2ForCausalLM")
    model = random_model(config)
    bias = model.layers[1].attention.qkv.bias
    bias.set_value(jnp.zeros_like(bias.get_value()))
    export_hf(model, config, tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "converted", progress=False)
    assert_same_parameters(load_checkpoint(tmp_path / "converted")[1], model)


def test_parameters_that_the_configuration_asks_for_and_are_not_there_are_listed(converted):
    edit_json(converted / "config.json", attention_bias=True)
    with pytest.raises(CheckpointError, match=r"missing: layers.0.attention.qkv.bias, .*layers.1.attention.o.bias"):
        load_checkpoint(converted)


def test_parameters_that_the_configuration_does_not_know_are_listed(converted):
    edit_json(converted / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"left over: layers.1.attention"):
        load_checkpoint(converted)


def test_a_parameter_of_another_shape_is_named_with_both_shapes(converted):
    edit_json(converted / "config.json", intermediate_size=28)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(converted)
    assert "layers.0.mlp.gate_up.kernel" in str(error.value)
    assert "has shape [26, 2, 22], but the configuration asks for [28, 2, 22]" in str(error.value)


def test_an_unsupported_configuration_is_refused_before_any_weight_is_read(converted):
    shutil.rmtree(converted / "weights")
    edit_json(converted / "config.json", sliding_window=8)
    with pytest.raises(UnsupportedConfigError, match="sliding_window=8"):
        load_checkpoint(converted)


def test_the_configuration_is_read_as_it_stands_and_as_it_is_understood(original):
    values, config = read_config(original / "converted")
    assert values == json.loads((original / "hf" / "config.json").read_text())
    assert config == dataclasses.replace(tiny_config(), dtype="float32")


def test_a_generation_config_is_optional(converted):
    assert read_generation_config(converted) == {}
    (converted / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    assert read_generation_config(converted) == {"eos_token_id": [1, 2], "temperature": 0.6}
    (converted / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="generation_config.json must hold a JSON object"):
        read_generation_config(converted)


DIVISIBLE = {"vocab_size": 40, "intermediate_size": 32, "num_heads": 8, "num_kv_heads": 2}


@pytest.mark.parametrize(("size", "heads"), [(1, 2), (2, 2), (4, 4), (8, 8)])
def test_more_devices_than_key_value_heads_repeat_them(size, heads):
    config = tiny_config(**DIVISIBLE)
    assert for_tensor_parallel(config, size) == dataclasses.replace(config, num_kv_heads=heads)


@pytest.mark.parametrize(
    ("fields", "size", "named"),
    [
        ({"vocab_size": 41}, 2, "tensor_parallel_size=2 does not divide vocab_size=41"),
        ({"intermediate_size": 33}, 2, "tensor_parallel_size=2 does not divide intermediate_size=33"),
        ({"num_heads": 14}, 4, "tensor_parallel_size=4 does not divide num_heads=14"),
        (
            {"num_heads": 12, "num_kv_heads": 3, "vocab_size": 40, "intermediate_size": 32},
            4,
            "tensor_parallel_size=4 neither divides nor is a multiple of num_kv_heads=3",
        ),
    ],
)
def test_what_cannot_be_split_evenly_is_refused_by_field(fields, size, named):
    with pytest.raises(ValueError) as error:
        for_tensor_parallel(tiny_config(**(DIVISIBLE | fields)), size)
    assert str(error.value) == named


@pytest.mark.parametrize("size", [4, 8])
def test_repeated_heads_compute_the_same(size):
    config = tiny_config("Qwen2ForCausalLM", **DIVISIBLE)
    more = for_tensor_parallel(config, size)
    model, regrouped = random_model(config), random_model(more, seed=1)
    values = parameters_of(model)
    for stored, final in zip(parameters(config), parameters(more), strict=True):
        array = values[stored.path][regrouping(stored, final)]
        assert array.shape == final.shape
        leaf = regrouped
        for name in stored.path.split("."):
            leaf = leaf[int(name)] if name.isdigit() else getattr(leaf, name)
        leaf.set_value(jnp.asarray(array))
    np.testing.assert_allclose(logits(regrouped), logits(model), rtol=1e-5, atol=1e-4)
