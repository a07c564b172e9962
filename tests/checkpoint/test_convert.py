"""Conversion: the same weights and companions, complete or not there at all, in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import CheckpointError, convert_checkpoint, load_checkpoint
from jaxinfer.checkpoint.safetensors_reader import StoredTensor
from jaxinfer.models.config import UnsupportedConfigError
from tests.checkpoint.builders import (
    EVERY_FIXTURE,
    FAMILY_CONFIGS,
    assert_same_parameters,
    parameters_of,
    tiny_config,
    write_checkpoint,
    write_large_checkpoint,
)
from tests.hf_fixtures import checkpoint_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    write_checkpoint(tmp_path / "source")
    return tmp_path / "source"


def convert(source, destination, **options):
    return convert_checkpoint(source, destination, **({"progress": False} | options))


def edit_tensors(directory, **changes):
    """Replace tensors of a single-file checkpoint; a value of None removes one."""
    tensors = load_file(directory / "model.safetensors")
    for name, values in changes.items():
        tensors[name.replace("__", ".")] = values
    save_file({name: v for name, v in tensors.items() if v is not None}, directory / "model.safetensors")


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("shard_bytes", [None, 6_000])
@pytest.mark.parametrize("name", ["llama_biases", "qwen2_tied", "qwen3"])
def test_a_model_comes_back_bit_for_bit(tmp_path, name, shard_bytes):
    model = write_checkpoint(tmp_path / "source", FAMILY_CONFIGS[name], max_shard_bytes=shard_bytes)
    assert convert(tmp_path / "source", tmp_path / "out") == tmp_path / "out"
    config, loaded = load_checkpoint(tmp_path / "out")
    assert config == load_checkpoint(tmp_path / "source")[0]
    assert_same_parameters(loaded, model)


@pytest.mark.parametrize("name", EVERY_FIXTURE)
def test_a_checkpoint_that_transformers_wrote_is_the_same_converted_or_not(tmp_path, name):
    convert(checkpoint_path(name), tmp_path / "out")
    direct, converted = load_checkpoint(checkpoint_path(name)), load_checkpoint(tmp_path / "out")
    assert converted[0] == direct[0]
    assert_same_parameters(converted[1], direct[1])


def test_the_weights_are_an_ordinary_orbax_checkpoint(tmp_path, source):
    convert(source, tmp_path / "out")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((tmp_path / "out" / "weights").absolute())
    parameters = parameters_of(load_checkpoint(source)[1])
    np.testing.assert_array_equal(
        tree["layers"]["1"]["attention"]["qkv"]["kernel"], parameters["layers.1.attention.qkv.kernel"]
    )
    np.testing.assert_array_equal(tree["final_norm"]["scale"], parameters["final_norm.scale"])
    assert set(tree) == {"embed", "layers", "final_norm", "lm_head"}


def test_no_file_knows_where_it_was_made(tmp_path, source):
    convert(source, tmp_path / "out")
    for file in (tmp_path / "out").rglob("*"):
        assert not file.is_file() or str(tmp_path).encode() not in file.read_bytes(), file


def test_companion_files_travel_unchanged_and_others_stay_behind(tmp_path, source):
    files = {
        name: f"contents of {name}\n"
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    }
    for name, text in files.items():
        (source / name).write_text(text)
    (source / "training_args.bin").write_text("pickle")
    (source / "README.md").write_text("card")
    convert(source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*files, "config.json", "jaxinfer.json", "weights"}
    for name, text in files.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "half", jnp.bfloat16])
def test_weights_are_cast_to_the_dtype_that_was_asked_for(tmp_path, source, dtype):
    convert(source, tmp_path / "out", dtype=dtype)
    wanted = jnp.dtype("float16" if dtype == "half" else dtype)
    config, loaded = load_checkpoint(tmp_path / "out")
    assert config.dtype == str(wanted)
    assert json.loads((tmp_path / "out" / "jaxinfer.json").read_text())["dtype"] == str(wanted)
    converted = parameters_of(loaded)
    for path, values in parameters_of(load_checkpoint(source)[1]).items():
        np.testing.assert_array_equal(converted[path], values.astype(wanted))


@pytest.mark.parametrize("dtype", [None, "auto"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_without_a_dtype_the_stored_one_is_kept(tmp_path, stored, dtype):
    write_checkpoint(tmp_path / "source", dtype=stored)
    edit_config(tmp_path / "source", dtype="float32")  # what the files hold counts
    convert(tmp_path / "source", tmp_path / "out", dtype=dtype)
    assert load_checkpoint(tmp_path / "out")[0].dtype == stored


def test_mixed_files_take_the_dtype_of_the_configuration(tmp_path, source):
    norm = np.ones(22, ml_dtypes.bfloat16)
    edit_tensors(source, model__norm__weight=norm)
    edit_config(source, dtype="bfloat16")
    convert(source, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out")[0].dtype == "bfloat16"
    edit_config(source, dtype=None)
    with pytest.raises(CheckpointError, match="mixes bfloat16, float32 and config.json names no dtype"):
        convert(source, tmp_path / "other")


@pytest.mark.parametrize("dtype", ["int8", "fp32", "", "float64", np.int32, 16])
def test_an_unknown_dtype_is_refused_with_what_is_allowed(tmp_path, source, dtype):
    with pytest.raises(ValueError) as error:
        convert(source, tmp_path / "out", dtype=dtype)
    assert f"dtype={dtype!r}" in str(error.value) and "auto, float32, float, bfloat16" in str(error.value)


@pytest.mark.parametrize("bad", [1e5, -7e4, np.inf, np.nan])
def test_weights_that_float16_cannot_hold_are_refused_by_name(tmp_path, source, bad):
    values = np.zeros((22, 26), np.float32)
    values[3, 4] = bad
    edit_tensors(source, **{"model__layers__1__mlp__down_proj__weight": values})
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.down_proj.weight in .* float16 cannot hold"):
        convert(source, tmp_path / "out", dtype="float16")
    convert(source, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down.kernel in .* float16 cannot hold"):
        load_checkpoint(tmp_path / "out", dtype="float16")


def test_whole_number_weights_are_refused(tmp_path, source):
    tensors = load_file(source / "model.safetensors")
    save_file({name: values.astype(np.int32) for name, values in tensors.items()}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="stores int32 weights"):
        convert(source, tmp_path / "out")


def test_missing_and_left_over_tensors_are_listed_with_the_directory(tmp_path, source):
    edit_tensors(source, model__norm__weight=None, model__layers__0__extra=np.ones(3, np.float32))
    with pytest.raises(CheckpointError) as error:
        convert(source, tmp_path / "out")
    assert str(error.value) == (
        f"{source}: the tensors do not match LlamaForCausalLM: missing: model.norm.weight; "
        "left over: model.layers.0.extra"
    )


def test_a_tied_table_may_be_stored_twice_if_both_are_equal(tmp_path):
    write_checkpoint(tmp_path / "source", tiny_config(tie_word_embeddings=True))
    table = load_file(tmp_path / "source" / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path / "source", lm_head__weight=table)
    convert(tmp_path / "source", tmp_path / "out")
    table[3, 4] = np.nan  # differs from itself, but not from its copy
    edit_tensors(tmp_path / "source", lm_head__weight=table, model__embed_tokens__weight=table)
    convert(tmp_path / "source", tmp_path / "with NaN")
    other = table.copy()
    other[39, 21] += 1
    edit_tensors(tmp_path / "source", lm_head__weight=other)
    with pytest.raises(CheckpointError, match=r"lm_head.weight in .* differs from model.embed_tokens.weight"):
        convert(tmp_path / "source", tmp_path / "other")


def test_a_damaged_file_is_named_and_leaves_nothing_behind(tmp_path, source):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"source/model.safetensors is truncated"):
        convert(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_remote_code_is_named_and_never_run(tmp_path, source, caplog):
    edit_config(source, auto_map={"AutoModelForCausalLM": "modeling_custom.Model"})
    (source / "modeling_custom.py").write_text("raise SystemExit")
    convert(source, tmp_path / "out")
    assert "code that comes with a checkpoint is never run" in caplog.text
    assert not (tmp_path / "out" / "modeling_custom.py").exists()


def test_unknown_fields_are_refused_unless_they_are_to_be_ignored(tmp_path, source):
    edit_config(source, rope_interleaved=True)
    with pytest.raises(UnsupportedConfigError, match="rope_interleaved=True"):
        convert(source, tmp_path / "out")
    fields = {"ignore_config_fields": ["rope_interleaved"], "strict_config": True}
    convert(source, tmp_path / "out", **fields)
    # config.json is copied unchanged, so that loading the result asks again.
    with pytest.raises(UnsupportedConfigError, match="rope_interleaved=True"):
        load_checkpoint(tmp_path / "out")
    assert_same_parameters(load_checkpoint(tmp_path / "out", **fields)[1], load_checkpoint(source, **fields)[1])


def test_pickle_files_are_refused_with_the_reason(tmp_path, source):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickle files only \(pytorch_model.bin\)"):
        convert(source, tmp_path / "out")


def test_a_missing_source_is_reported_with_the_path_that_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"no checkpoint directory at {tmp_path}/nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "out")


def test_a_missing_directory_in_a_local_folder_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint directory at .*/checkpoints/tyni"):
        convert("checkpoints/tyni", tmp_path / "out")


def test_names_of_directories_may_have_any_characters(tmp_path):
    folder = tmp_path / "a b%20c#d?e&f"
    model = write_checkpoint(folder / "source")
    convert(folder / "source", folder / "out put")
    assert_same_parameters(load_checkpoint(folder / "out put")[1], model)


def test_a_file_is_no_source(tmp_path, source):
    with pytest.raises(CheckpointError, match="model.safetensors is a file; name the directory"):
        convert(source / "model.safetensors", tmp_path / "out")


def test_a_directory_without_configuration_is_no_source(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty is not a checkpoint: it has no config.json"):
        convert(tmp_path / "empty", tmp_path / "out")


def test_a_converted_directory_is_no_source(tmp_path, source):
    convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="out is converted already"):
        convert(tmp_path / "out", tmp_path / "again")


def test_progress_counts_the_bytes_of_the_source(tmp_path, source, capfd):
    convert(source, tmp_path / "silent")
    assert capfd.readouterr().err == ""
    convert(source, tmp_path / "loud", progress=True)
    err = capfd.readouterr().err
    size = sum(tensor.nbytes for tensor in load_file(source / "model.safetensors").values())
    assert "converting source" in err and f"{size / 1000:.1f}k/{size / 1000:.1f}k" in err and "100%" in err


def test_one_tensor_is_read_at_a_time_and_each_once(tmp_path, source, monkeypatch):
    read, names = StoredTensor.read, []

    def recording(self):
        names.append(self.name)
        return read(self)

    monkeypatch.setattr(StoredTensor, "read", recording)
    convert(source, tmp_path / "out")
    assert sorted(names) == sorted(load_file(source / "model.safetensors"))


def test_a_hub_id_is_downloaded_without_pickles_or_code(tmp_path, source, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    convert("organisation/model-1.5", tmp_path / "out", revision="main")
    load_checkpoint(tmp_path / "out")
    assert asked["name"] == "organisation/model-1.5" and asked["revision"] == "main"
    wanted = huggingface_hub.utils.filter_repo_objects(
        ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
         "chat_template.jinja", "generation_config.json", "pytorch_model.bin", "modeling.py", "original/params.json",
         "original/model.safetensors"],
        allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"],
    )  # fmt: skip
    assert list(wanted) == [
        "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
        "chat_template.jinja", "generation_config.json",
    ]  # fmt: skip


def test_without_a_network_a_hub_id_gives_the_reason_and_the_way_out(tmp_path, monkeypatch):
    def download(name, **options):
        raise ConnectionError("no route to host\nand many more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        convert("organisation/model", tmp_path / "out")
    assert str(error.value) == (
        "there is no directory organisation/model, and as a hub id it cannot be downloaded "
        "(ConnectionError: no route to host); check the name and the network, or pass a local directory"
    )


@pytest.mark.slow
def test_memory_stays_near_the_largest_tensor(tmp_path):
    largest, total = write_large_checkpoint(tmp_path / "large")
    assert total > 12 * largest
    write_checkpoint(tmp_path / "small")
    measured = subprocess.run(
        [sys.executable, Path(__file__).with_name("measure_conversion.py"), tmp_path / "large", tmp_path / "out",
         tmp_path / "small"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    growth = json.loads(measured.stdout)["growth"]
    assert growth < 4 * largest, f"{growth / 2**20:.0f} MiB for a largest tensor of {largest / 2**20:.0f} MiB"
