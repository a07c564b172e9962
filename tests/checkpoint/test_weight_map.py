"""The weight map: every source tensor has one place, every place has one source, and heads are where they belong."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.weight_map import Placement, match_sources, parameters, placements, tied_copies
from jaxinfer.models.registry import build_model
from tests.checkpoint.builders import FAMILY_CONFIGS, tiny_config

LAYER_NORM = "layers.1.input_norm.scale"


@pytest.fixture(params=FAMILY_CONFIGS)
def config(request):
    return FAMILY_CONFIGS[request.param]


def sources(config):
    return {placement.source: placement.source_shape for placement in placements(config)}


def placed(config, source):
    return next(placement for placement in placements(config) if placement.source == source)


def test_the_parameters_of_the_map_are_those_of_the_module(config):
    abstract = nnx.state(nnx.eval_shape(lambda: build_model(config)), nnx.Param)
    module = {".".join(map(str, path)): leaf.get_value().shape for path, leaf in nnx.to_flat_state(abstract)}
    assert {parameter.path: parameter.shape for parameter in parameters(config)} == module


def test_sources_cover_every_element_of_every_parameter_once(config):
    counts = {parameter.path: np.zeros(parameter.shape, int) for parameter in parameters(config)}
    for placement in placements(config):
        counts[placement.target.path][placement.part] += 1
    for path, count in counts.items():
        assert (count == 1).all(), path


def test_every_element_of_a_source_is_taken_once(config):
    taken = {source: np.zeros(shape[0], int) for source, shape in sources(config).items()}
    for placement in placements(config):
        taken[placement.source][placement.taken or slice(None)] += 1
    assert all((count == 1).all() for count in taken.values())


def test_storing_and_taking_out_again_gives_the_same_tensor(config):
    rng = np.random.default_rng(0)
    whole = {parameter.path: np.full(parameter.shape, np.nan, np.float32) for parameter in parameters(config)}
    # Multiples of a power of two, to which 1 can be added exactly.
    tensors = {
        source: np.round(rng.standard_normal(shape, np.float32) * 4096) / 4096
        for source, shape in sources(config).items()
    }

    def source_of(placement: Placement) -> np.ndarray:
        return tensors[placement.source][placement.taken or slice(None)]

    for placement in placements(config):
        placement.store(source_of(placement), whole[placement.target.path])
    for placement in placements(config):
        np.testing.assert_array_equal(placement.to_source(whole[placement.target.path]), source_of(placement))


def test_query_head_h_is_member_h_mod_g_of_key_value_head_h_div_g():
    config = tiny_config(qkv_bias=True, o_bias=True)
    group, dim = config.group_size, config.head_dim
    for source in ("weight", "bias"):
        placement = placed(config, f"model.layers.1.self_attn.q_proj.{source}")
        heads = np.repeat(np.arange(config.num_heads), dim).astype(np.float32)
        tensor = heads[:, None] + np.zeros(placement.source_shape) if source == "weight" else heads
        parameter = np.full(placement.target.shape, -1.0)
        placement.store(tensor, parameter)
        for head in range(config.num_heads):
            assert (parameter[head // group, head % group] == head).all()
        assert (parameter[:, group:] == -1).all()
    placement = placed(config, "model.layers.0.self_attn.o_proj.weight")
    parameter = np.zeros(placement.target.shape)
    placement.store(np.broadcast_to(np.repeat(np.arange(config.num_heads), dim), placement.source_shape), parameter)
    for head in range(config.num_heads):
        assert (parameter[:, head // group, head % group] == head).all()


def test_key_and_value_follow_their_queries():
    config = tiny_config()
    for name, slot in (("k", config.group_size), ("v", config.group_size + 1)):
        placement = placed(config, f"model.layers.0.self_attn.{name}_proj.weight")
        parameter = np.full(placement.target.shape, -1.0)
        heads = np.repeat(np.arange(config.num_kv_heads), config.head_dim)
        placement.store(heads[:, None] + np.zeros(placement.source_shape), parameter)
        assert (parameter[:, slot] == np.arange(config.num_kv_heads)[:, None, None]).all()


def test_a_matrix_is_stored_as_it_is_and_gate_stands_before_up():
    config = tiny_config()
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, config.intermediate_size, config.hidden_size))
    parameter = np.zeros((config.intermediate_size, 2, config.hidden_size))
    placed(config, "model.layers.0.mlp.gate_proj.weight").store(gate, parameter)
    placed(config, "model.layers.0.mlp.up_proj.weight").store(up, parameter)
    np.testing.assert_array_equal(parameter[:, 0], gate)
    np.testing.assert_array_equal(parameter[:, 1], up)


def test_storing_casts_to_the_dtype_of_the_parameter():
    config = tiny_config(hidden_size=130)
    placement = placed(config, "model.layers.0.mlp.down_proj.weight")
    source = np.random.default_rng(0).standard_normal(placement.source_shape, np.float32)
    parameter = np.zeros(placement.target.shape, jnp.bfloat16)
    placement.store(source, parameter)
    np.testing.assert_array_equal(parameter, source.astype(jnp.bfloat16))


def test_parameters_split_over_heads_inner_columns_and_vocabulary():
    specs = {
        parameter.path: parameter.spec
        for parameter in parameters(tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True))
    }
    layer = "layers.1."
    assert specs["embed.embedding"] == P("tensor", None)
    assert specs["lm_head.kernel"] == P("tensor", None)
    assert specs[layer + "attention.qkv.kernel"] == P("tensor", None, None, None)
    assert specs[layer + "attention.qkv.bias"] == P("tensor", None, None)
    assert specs[layer + "attention.o.kernel"] == P(None, "tensor", None, None)
    assert specs[layer + "mlp.gate_up.kernel"] == P("tensor", None, None)
    assert specs[layer + "mlp.gate_up.bias"] == P("tensor", None)
    assert specs[layer + "mlp.down.kernel"] == P(None, "tensor")
    whole = {path for path, spec in specs.items() if "tensor" not in spec}
    assert whole == {"final_norm.scale"} | {
        f"layers.{i}.{name}"
        for i in (0, 1)
        for name in ("input_norm.scale", "post_attention_norm.scale", "attention.q_norm.scale",
                     "attention.k_norm.scale", "attention.o.bias", "mlp.down.bias")
    }  # fmt: skip


def test_a_checkpoint_with_exactly_the_mapped_tensors_matches(config):
    assert match_sources(sources(config), config) == {name: name for name in sources(config)}


def test_missing_and_superfluous_tensors_are_listed(config):
    found = sources(config)
    missing = sorted(p.source for p in placements(config) if p.target.path in ("final_norm.scale", LAYER_NORM))
    assert len(missing) == 2
    for name in missing:
        del found[name]
    found["model.layers.1.mlp.extra.weight"] = (3,)
    with pytest.raises(CheckpointError) as error:
        match_sources(found, config)
    message = str(error.value)
    assert message.startswith(f"the tensors do not match {config.architecture}: missing: ")
    assert all(name in message.partition("; left over: ")[0] for name in missing)
    assert "left over: model.layers.1.mlp.extra.weight" in message


def test_names_of_llada():
    config = FAMILY_CONFIGS["llada"]
    attention, mlp = "layers.1.attention.", "layers.1.mlp."
    assert {name.removeprefix("model.transformer."): placed(config, name).target.path for name in sources(config)
            if "blocks.0" not in name} == {
        "wte.weight": "embed.embedding", "ln_f.weight": "final_norm.scale", "ff_out.weight": "lm_head.kernel",
        "blocks.1.attn_norm.weight": LAYER_NORM, "blocks.1.ff_norm.weight": "layers.1.post_attention_norm.scale",
        **{f"blocks.1.{x}_proj.weight": attention + "qkv.kernel" for x in "qkv"},
        "blocks.1.attn_out.weight": attention + "o.kernel", "blocks.1.ff_proj.weight": mlp + "gate_up.kernel",
        "blocks.1.up_proj.weight": mlp + "gate_up.kernel", "blocks.1.ff_out.weight": mlp + "down.kernel",
    }  # fmt: skip
    # The gate is what the activation is applied to.
    assert placed(config, "model.transformer.blocks.1.ff_proj.weight").part[1] == slice(0, 1)
    assert placed(config, "model.transformer.blocks.1.up_proj.weight").part[1] == slice(1, 2)


def test_names_of_llada_moe():
    found = sources(FAMILY_CONFIGS["llada_moe"])
    layer = {name.removeprefix("model.layers.1."): shape for name, shape in found.items() if ".layers.1." in name}
    assert {name for name in layer if "experts" not in name} == {
        f"{name}.weight" for name in (
            "input_layernorm", "post_attention_layernorm", "mlp.gate", "self_attn.q_proj", "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "shared_expert.gate_proj",
            "shared_expert.up_proj", "shared_expert.down_proj",
        )
    }  # fmt: skip
    assert layer["mlp.experts.3.down_proj.weight"] == (60, 14) and layer["shared_expert.down_proj.weight"] == (60, 18)
    assert found["model.layers.0.mlp.gate_proj.weight"] == (26, 60)


@pytest.mark.parametrize(
    ("field", "source"),
    [
        ("qkv_bias", "model.layers.0.self_attn.k_proj.bias"),
        ("o_bias", "model.layers.0.self_attn.o_proj.bias"),
        ("mlp_bias", "model.layers.0.mlp.down_proj.bias"),
        ("qk_norm", "model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_optional_tensors_are_neither_missing_nor_ignored(field, source):
    with_them, without = tiny_config(**{field: True}), tiny_config()
    with pytest.raises(CheckpointError, match=f"left over: .*{source}"):
        match_sources(sources(with_them), without)
    with pytest.raises(CheckpointError, match=f"missing: .*{source}"):
        match_sources(sources(without), with_them)


def test_a_wrong_shape_is_reported_with_both_shapes():
    config = tiny_config()
    found = sources(config) | {"model.layers.0.self_attn.q_proj.weight": (30, 22)}
    with pytest.raises(CheckpointError) as error:
        match_sources(found, config)
    assert str(error.value) == (
        "model.layers.0.self_attn.q_proj.weight has shape [30, 22], but the configuration asks for [60, 22]"
    )


def test_long_lists_are_cut():
    config = tiny_config(num_layers=9)
    with pytest.raises(CheckpointError, match=r"left over: .*\.8\.|and \d+ more"):
        match_sources(sources(config), tiny_config(num_layers=2))


def test_rotary_buffers_are_known_to_carry_nothing():
    config = tiny_config()
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (5,), "model.rotary_emb.inv_freq": (5,)}
    assert match_sources(sources(config) | buffers, config).keys() == sources(config).keys()


def test_a_copy_of_a_tied_table_is_accepted_and_named():
    config = tiny_config(tie_word_embeddings=True)
    found = sources(config) | {"lm_head.weight": (40, 22)}
    assert match_sources(found, config).keys() == sources(config).keys()
    assert tied_copies(found, config) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_copies(found, tiny_config()) == {}


def test_a_copy_of_a_tied_table_has_the_names_of_its_family():
    config = FAMILY_CONFIGS["llada_tied"]
    copy, table = "model.transformer.ff_out.weight", "model.transformer.wte.weight"
    found = sources(config) | {copy: (40, 60)}
    assert match_sources(found, config).keys() == sources(config).keys()
    assert tied_copies(found, config) == {copy: table}
    bare = {name.removeprefix("model."): shape for name, shape in found.items()}
    assert tied_copies(bare, config) == {copy.removeprefix("model."): table.removeprefix("model.")}


def test_a_bare_decoder_lacks_the_prefix():
    config = tiny_config(tie_word_embeddings=True)
    bare = {name.removeprefix("model."): shape for name, shape in sources(config).items()}
    assert match_sources(bare, config) == {name: name.removeprefix("model.") for name in sources(config)}


def test_a_mixture_of_prefixed_and_bare_names_is_refused():
    config = tiny_config()
    found = sources(config)
    found["norm.weight"] = found.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match="missing: model.norm.weight; left over: norm.weight"):
        match_sources(found, config)


def test_a_bare_decoder_without_tied_embeddings_has_no_head():
    config = tiny_config()
    bare = {name.removeprefix("model."): s for name, s in sources(config).items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match="missing: lm_head.weight"):
        match_sources(bare, config)
