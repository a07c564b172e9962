"""EAGLE-3 heads: as published or converted the same head, or an error that says what does not fit."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxinfer.checkpoint import CheckpointError, convert_checkpoint, load_checkpoint, load_head
from jaxinfer.checkpoint.export import export_head
from jaxinfer.models.config import UnsupportedConfigError
from jaxinfer.models.eagle3 import Eagle3Head
from tests.checkpoint.builders import tiny_config, write_checkpoint
from tests.checkpoint.heads import (
    DIM,
    HEADS,
    KV_HEADS,
    TARGET,
    WORDS,
    head_config,
    head_tensors,
    token_ids,
    write_head,
)

HIDDEN = TARGET.hidden_size


def contents(head: Eagle3Head) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(head))}


def assert_same(left: Eagle3Head, right: Eagle3Head) -> None:
    ours, theirs = contents(left), contents(right)
    assert left.config == right.config and ours.keys() == theirs.keys()
    for path, values in ours.items():
        assert values.dtype == theirs[path].dtype, path
        np.testing.assert_array_equal(values, theirs[path], err_msg=path)


@pytest.fixture
def either(tmp_path):
    """A function that writes a head and gives its directory, as published or converted."""

    def write(kind, config=None, tensors=None):
        write_head(tmp_path / "hf", config, tensors)
        if kind == "converted":
            convert_checkpoint(tmp_path / "hf", tmp_path / "converted", progress=False)
        return tmp_path / kind

    return write


KINDS = pytest.mark.parametrize("kind", ["hf", "converted"])


def test_every_tensor_comes_to_its_place(tmp_path):
    tensors = write_head(tmp_path / "hf")
    found = contents(load_head(tmp_path / "hf", TARGET))
    group = HEADS // KV_HEADS
    q = tensors["midlayer.self_attn.q_proj.weight"].reshape(KV_HEADS, group, DIM, 2 * HIDDEN)
    k, v = (tensors[f"midlayer.self_attn.{x}_proj.weight"].reshape(KV_HEADS, 1, DIM, 2 * HIDDEN) for x in "kv")
    gate, up = (tensors[f"midlayer.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    expected = {
        "fc.kernel": tensors["fc.weight"],
        "input_norm.scale": tensors["midlayer.input_layernorm.weight"],
        "feature_norm.scale": tensors["midlayer.hidden_norm.weight"],
        "attention.qkv.kernel": np.concatenate([q, k, v], axis=1),
        "attention.o.kernel": tensors["midlayer.self_attn.o_proj.weight"].reshape(HIDDEN, KV_HEADS, group, DIM),
        "post_attention_norm.scale": tensors["midlayer.post_attention_layernorm.weight"],
        "mlp.gate_up.kernel": np.stack([gate, up], axis=1),
        "mlp.down.kernel": tensors["midlayer.mlp.down_proj.weight"],
        "final_norm.scale": tensors["norm.weight"],
        "lm_head.kernel": tensors["lm_head.weight"],
        "target_ids": token_ids(tensors),
    }
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values, err_msg=path)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("own_embeddings", [False, True])
def test_a_converted_head_is_the_published_one(tmp_path, dtype, own_embeddings):
    tensors = head_tensors()
    if own_embeddings:
        tensors["embed_tokens.weight"] = np.ones((TARGET.vocab_size, HIDDEN), np.float32)
    write_head(tmp_path / "hf", tensors=tensors)
    assert convert_checkpoint(tmp_path / "hf", tmp_path / "out", dtype=dtype, progress=False) == tmp_path / "out"
    head = load_head(tmp_path / "out", TARGET)
    assert_same(head, load_head(tmp_path / "hf", TARGET, dtype=dtype))
    assert head.config.has_embeddings is own_embeddings and head.config.layer.dtype == (dtype or "float32")
    assert head.dtype == jnp.dtype(dtype or "float32")


@KINDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_token_ids_are_int32_whatever_the_weights_are(either, kind, dtype):
    target = tiny_config("Qwen3ForCausalLM", num_layers=8, vocab_size=4001)
    tensors = head_tensors(target, words=3000)
    path = either(kind, head_config(target, draft_vocab_size=3000), tensors)
    head = load_head(path, target, dtype=dtype)
    ids = np.asarray(head.target_ids[...])
    assert ids.dtype == np.int32 and head.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(ids, token_ids(tensors))


@KINDS
def test_a_head_of_all_words_needs_no_token_ids(either, kind):
    tensors = head_tensors(words=TARGET.vocab_size)
    del tensors["d2t"], tensors["t2d"]
    path = either(kind, head_config(draft_vocab_size=None), tensors)
    np.testing.assert_array_equal(load_head(path, TARGET).target_ids[...], np.arange(TARGET.vocab_size))


@pytest.mark.parametrize(
    ("prefix", "layer"), [("model.", "midlayer."), ("", "layers.0."), ("model.", "layers.0.")], ids=str
)
def test_other_beginnings_of_names_are_known(tmp_path, prefix, layer):
    tensors = write_head(tmp_path / "hf")
    own = {"lm_head.weight", "d2t", "t2d"}
    named = {
        (name if name in own else prefix + name.replace("midlayer.", layer)): values for name, values in tensors.items()
    }
    write_head(tmp_path / "other", tensors=named)
    convert_checkpoint(tmp_path / "other", tmp_path / "converted", progress=False)
    plain = load_head(tmp_path / "hf", TARGET)
    assert_same(load_head(tmp_path / "other", TARGET), plain)
    assert_same(load_head(tmp_path / "converted", TARGET), plain)


def test_a_tensor_under_two_names_is_left_over(tmp_path):
    tensors = head_tensors()
    write_head(tmp_path / "hf", tensors=tensors | {"model.norm.weight": tensors["norm.weight"]})
    with pytest.raises(CheckpointError, match=r"left over: model\.norm\.weight"):
        load_head(tmp_path / "hf", TARGET)


@KINDS
def test_a_narrower_head_has_embeddings_of_its_own(either, kind):
    config = head_config(hidden_size=18, target_hidden_size=HIDDEN)
    tensors = head_tensors(hidden=18, features=3 * HIDDEN)
    tensors["embed_tokens.weight"] = np.ones((TARGET.vocab_size, 18), np.float32)
    head = load_head(either(kind, config, tensors), TARGET)
    assert head.embed is not None and head.embed.embedding.shape == (TARGET.vocab_size, 18)
    assert head.fc is not None and head.fc.kernel.shape == (18, 3 * HIDDEN)


@KINDS
def test_a_narrower_head_without_them_is_refused(either, kind):
    config = head_config(hidden_size=18, target_hidden_size=HIDDEN)
    path = either(kind, config, head_tensors(hidden=18, features=3 * HIDDEN))
    with pytest.raises(UnsupportedConfigError, match=r"no embed_tokens\.weight.*hidden size 22.*hidden_size=18"):
        load_head(path, TARGET)


@KINDS
def test_features_of_another_target_are_refused(either, kind):
    path = either(kind, None, head_tensors(features=3 * 30))
    with pytest.raises(CheckpointError, match=r"fc takes 90 features.*3 layers \(2, 4, 5\) of hidden size 22 give 66"):
        load_head(path, TARGET)


@KINDS
def test_more_features_than_the_layers_that_are_named_are_refused(either, kind):
    path = either(kind, None, head_tensors(features=4 * HIDDEN))
    with pytest.raises(CheckpointError, match="fc takes 88 features"):
        load_head(path, TARGET)


@KINDS
def test_a_head_of_a_deep_target_is_refused_for_a_shallow_one(either, kind):
    path = either(kind)
    with pytest.raises(UnsupportedConfigError, match=r"\(2, 2, 1\) \(EAGLE-3's choice\).*which has 4"):
        load_head(path, tiny_config("Qwen3ForCausalLM", num_layers=4))


@KINDS
def test_another_vocabulary_is_refused(either, kind):
    path = either(kind)
    with pytest.raises(UnsupportedConfigError, match="vocab_size=40 is not its target's, which is 41"):
        load_head(path, tiny_config("Qwen3ForCausalLM", num_layers=8, vocab_size=41))


@KINDS
@pytest.mark.parametrize("token", [-1, 40])
def test_a_token_outside_of_the_vocabulary_is_refused(either, kind, token):
    tensors = head_tensors()
    tensors["d2t"][WORDS - 1] = token - (WORDS - 1)
    path = either(kind, None, tensors)
    with pytest.raises(CheckpointError, match=rf"d2t .*draft word 15 is token {token}, outside .*of 40"):
        load_head(path, TARGET)


@pytest.mark.parametrize("name", ["d2t", "fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = head_tensors()
    del tensors[name]
    write_head(tmp_path / "hf", tensors=tensors)
    with pytest.raises(CheckpointError, match="fc takes 22 features" if name == "fc.weight" else f"missing: {name}"):
        load_head(tmp_path / "hf", TARGET)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    tensors = head_tensors()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    write_head(tmp_path / "hf", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[15, 22\], .* \[16, 22\]"):
        load_head(tmp_path / "hf", TARGET)


def test_a_pickle_is_refused_with_the_way_out(tmp_path):
    write_head(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    for load in (lambda path: load_head(path, TARGET), lambda path: convert_checkpoint(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*safetensors\.torch\.save_file\(torch\.load"):
            load(tmp_path / "hf")


def test_a_model_is_no_head_and_a_head_no_model(tmp_path):
    write_checkpoint(tmp_path / "model")
    write_head(tmp_path / "head")
    with pytest.raises(UnsupportedConfigError, match="LlamaForCausalLM is not the architecture of an EAGLE-3 head"):
        load_head(tmp_path / "model", TARGET)
    with pytest.raises(UnsupportedConfigError, match="unknown architecture LlamaForCausalLMEagle3"):
        load_checkpoint(tmp_path / "head")


def test_a_converted_model_is_no_head(tmp_path):
    write_checkpoint(tmp_path / "model")
    convert_checkpoint(tmp_path / "model", tmp_path / "converted", progress=False)
    shutil.copy(write_head(tmp_path / "head") and tmp_path / "head" / "config.json", tmp_path / "converted")
    with pytest.raises(CheckpointError, match=r"jaxinfer\.json does not describe a head"):
        load_head(tmp_path / "converted", TARGET)


def test_an_exported_head_is_a_published_one(tmp_path):
    tensors = write_head(tmp_path / "hf")
    head = load_head(tmp_path / "hf", TARGET)
    export_head(head, tmp_path / "again", dtype="float32")
    assert_same(load_head(tmp_path / "again", TARGET), head)
    values = json.loads((tmp_path / "again" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and values["draft_vocab_size"] == WORDS
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    del tensors["t2d"]
    found = load_head(tmp_path / "again", TARGET)
    np.testing.assert_array_equal(found.target_ids[...], token_ids(tensors))


@KINDS
def test_one_device_is_a_mesh_of_one(either, kind):
    path = either(kind)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    assert_same(load_head(path, TARGET, mesh=mesh), load_head(path, TARGET))


def test_a_biased_head_has_its_biases(tmp_path):
    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "o": HIDDEN}
    biases = {f"midlayer.self_attn.{x}_proj.bias": np.full(size, ord(x), np.float32) for x, size in sizes.items()}
    write_head(tmp_path / "hf", head_config(attention_bias=True), head_tensors() | biases)
    head = load_head(tmp_path / "hf", TARGET)
    assert head.attention.o.bias is not None and (head.attention.o.bias[...] == ord("o")).all()


def test_extra_files_of_a_directory_do_not_disturb(tmp_path):
    write_head(tmp_path / "hf")
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "hf" / "other.safetensors")
    assert load_head(tmp_path / "hf", TARGET).config.capture == (2, 4, 5)
