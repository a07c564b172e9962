"""Supported families of Hugging Face architectures: their fields, defaults, and settings that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxinfer.models.config_fields import UnsupportedConfigError, flag, is_active, size
from jaxinfer.models.experts_config import BAILING_EXPERTS, LLADA_EXPERTS, QWEN_EXPERTS, ExpertsFields


@dataclass(frozen=True)
class Family:
    """Traits that distinguish one Hugging Face architecture from its siblings, with that library's defaults.

    `summary` begins with the models' name and a colon.
    """

    architecture: str
    model_type: str
    summary: str
    other_model_types: frozenset[str] = frozenset()
    qkv_bias: bool = False  # q, k and v have biases whatever the fields say
    qkv_bias_fields: tuple[str, ...] = ()  # fields any of which gives q, k and v biases
    o_bias_fields: tuple[str, ...] = ()
    mlp_bias_field: bool = False
    qk_norm: bool = False
    qk_norm_field: str | None = None  # field that says whether q and k are normed
    # Layers that get a window from `use_sliding_window`. "none": the family does not know the field. "by_layer": those
    # that `layer_types` names, or else all from number `max_window_layers` on. "everywhere": all layers.
    windows: Literal["none", "by_layer", "everywhere"] = "none"
    has_partial_rope: bool = False  # `partial_rotary_factor` or `rotary_dim` may rotate only part of a head
    has_norm_head: bool = False  # `norm_head` may ask for a normed output head
    has_nextn_layers: bool = False  # `num_nextn_predict_layers` drafting layers may follow; not computed
    experts: ExpertsFields | None = None
    names: str = "llama"  # tensor names of its checkpoints: a key of `checkpoint.rows.NAMES`
    has_remote_code: bool = False  # Hugging Face runs code from its checkpoints, reimplemented here
    is_diffusion: bool = False  # `mask_token_id` is the placeholder of tokens not known yet
    is_bidirectional: bool = False  # all tokens see each other, so there are no trained blocks
    has_padded_vocab: bool = False  # `embedding_size` may be above `vocab_size`
    renamed: Mapping[str, str] = field(default_factory=dict)  # common name of a field -> this family's name
    absent: frozenset[str] = frozenset()  # common fields that this family does not read
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of which only one value is supported
    unused_fields: frozenset[str] = frozenset()  # further fields that change no forward pass, mostly of training
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_blocks(self) -> bool:
        """Whether it denoises blocks of the size it was trained for, which is `block_size`."""
        return self.is_diffusion and not self.is_bidirectional

    def name_of(self, name: str) -> str:
        """This family's name of a common field."""
        return self.renamed.get(name, name)

    @property
    def read_fields(self) -> frozenset[str]:
        """Fields of its configurations that are used, or refused if they ask for something unsupported."""
        names = (_READ - self.absent - self.renamed.keys()) | self.own_fields
        return names | (_WINDOW_FIELDS if self.windows != "none" else frozenset())

    @property
    def known_fields(self) -> frozenset[str]:
        """Fields of its configurations that are read here, and those that change no output."""
        # The `auto_map` of a family with remote code names the code that is reimplemented here.
        own_code = {"auto_map"} if self.has_remote_code else set()
        return self.read_fields | _INERT | self.unused_fields | own_code

    @property
    def own_fields(self) -> frozenset[str]:
        """Fields of its configurations that are read here and that some other families lack."""
        names = {*self.qkv_bias_fields, *self.o_bias_fields}
        names |= {"mlp_bias"} if self.mlp_bias_field else set()
        names |= {self.qk_norm_field} if self.qk_norm_field else set()
        names |= {"rotary_dim"} if self.has_partial_rope else set()
        names |= {"norm_head"} if self.has_norm_head else set()
        names |= {"num_nextn_predict_layers"} if self.has_nextn_layers else set()
        names |= {"mask_token_id"} if self.is_diffusion else set()
        names |= {"block_size"} if self.has_blocks else set()
        names |= {"embedding_size"} if self.has_padded_vocab else set()
        names |= {*self.renamed.values(), *self.fixed}
        return frozenset(names) | (self.experts.names if self.experts else frozenset())


_COMMON = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = _COMMON | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_LING = _COMMON | {
    "rope_theta": 600000.0, "max_position_embeddings": 32768, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0, "num_shared_experts": 0, "n_group": 0, "topk_group": 0,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_LING_2 = _LING | {
    "vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 512, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True, "eos_token_id": 156892,
}  # fmt: skip
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias_fields": ("attention_bias",), "o_bias_fields": ("attention_bias",)}
_QWEN_3: dict[str, Any] = _ATTENTION_BIAS | {"qk_norm": True}
_LING_FIELDS: dict[str, Any] = {
    "qkv_bias_fields": ("use_bias", "use_qkv_bias"), "o_bias_fields": ("use_bias",), "qk_norm_field": "use_qk_norm",
    "has_partial_rope": True, "has_norm_head": True, "has_nextn_layers": True, "experts": BAILING_EXPERTS,
    "names": "bailing", "has_remote_code": True,
    "unused_fields": frozenset({
        "embedding_dropout", "output_dropout", "router_dtype", "use_rmsnorm", "max_window_layers",
        "output_router_logits", "router_aux_loss_coef", "mtp_loss_scaling_factor",
        "moe_shared_expert_intermediate_size",
    }),
}  # fmt: skip
# Settings of the trainer: expert parallelism, the loss, debug output, micro-batching, recomputation.
_SDAR_TRAINING = frozenset({
    "ep_size", "use_deepep", "fuse_cross_entropy", "debug", "micro_forward", "skip_checkpoint",
})  # fmt: skip
# Absent fields mean what they mean in the published code, even if `fixed` then refuses them.
_LLADA: dict[str, Any] = {
    "has_remote_code": True, "is_diffusion": True, "is_bidirectional": True, "has_padded_vocab": True, "names": "llada",
    "renamed": {
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads", "intermediate_size": "mlp_hidden_size", "hidden_act": "activation_type",
        "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying",
    },
    "absent": frozenset({"head_dim", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}),
    "fixed": {
        "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "layer_norm_with_affine": True,
        "rope": True, "rope_full_precision": True, "block_group_size": 1,
    },
    "unused_fields": frozenset({
        "alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "residual_dropout",
        "flash_attention", "init_cutoff_factor", "init_device", "init_fn", "init_std", "precision", "mlp_ratio",
    }),
    "defaults": {
        "block_type": "sequential", "activation_type": "swiglu", "layer_norm_type": "default", "rope": False,
        "rms_norm_eps": 1e-5, "weight_tying": True, "mask_token_id": 126336, "eos_token_id": 126081,
    },
}  # fmt: skip
_LLADA_MOE: dict[str, Any] = _ATTENTION_BIAS | {
    "qk_norm_field": "qk_layernorm", "experts": LLADA_EXPERTS, "has_remote_code": True, "is_diffusion": True,
    "is_bidirectional": True, "names": "llada_moe", "renamed": {"intermediate_size": "dense_intermediate_size"},
    "absent": frozenset({"head_dim", "rope_parameters"}),
    "fixed": {"partial_rotary_factor": 1},  # the published code reads an absent one as -1
    "unused_fields": frozenset({"intermediate_size", "output_router_logits", "router_aux_loss_coef"}),
    "defaults": {
        "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "mask_token_id": 156895, "eos_token_id": 156892,
    },
}  # fmt: skip

FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama",
               "Llama 2 and 3.x: grouped-query attention, optional biases, linear, llama3 or yarn rotary scaling.",
               **_ATTENTION_BIAS, mlp_bias_field=True,
               defaults=_COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048,
                                   "bos_token_id": 1, "eos_token_id": 2}),
        Family("Qwen2ForCausalLM", "qwen2",
               "Qwen2 and Qwen2.5: the Llama layout with biases on q, k and v.",
               qkv_bias=True, windows="by_layer", defaults=_QWEN),
        Family("Qwen3ForCausalLM", "qwen3",
               "Qwen3 dense: the Llama layout with an RMS norm on every head of q and k before the rotation.",
               **_QWEN_3, windows="by_layer", defaults=_QWEN | {"head_dim": 128}),
        Family("SDARForCausalLM", "sdar",
               "SDAR: Qwen3's layers over blocks of tokens that see each other, a block-diffusion model.",
               **_QWEN_3, windows="by_layer", has_remote_code=True, is_diffusion=True,
               unused_fields=_SDAR_TRAINING,
               defaults=_QWEN | {"head_dim": 128, "block_size": 4, "mask_token_id": 151669,
                                 "eos_token_id": [151645, 151643]}),
        Family("Qwen3MoeForCausalLM", "qwen3_moe",
               "Qwen3-MoE: Qwen3's attention, and experts in place of the MLP of most layers.",
               **_QWEN_3, windows="everywhere", experts=QWEN_EXPERTS,
               unused_fields=frozenset({"output_router_logits", "router_aux_loss_coef"}),
               defaults=_QWEN | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
                                 "num_key_value_heads": 4, "decoder_sparse_step": 1, "moe_intermediate_size": 768,
                                 "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False}),
        Family("BailingMoeForCausalLM", "bailing_moe",
               "Ling: Llama's attention, experts that a softmax scores, and shared ones.",
               **_LING_FIELDS,
               defaults=_LING | {"score_function": "softmax", "use_qk_norm": False}),
        Family("BailingMoeV2ForCausalLM", "bailing_moe",
               "Ling 2.0: heads with norms, rotated in part; experts that a sigmoid scores, by groups and with a bias.",
               **_LING_FIELDS, defaults=_LING_2),
        Family("LLaDA2MoeModelLM", "llada2_moe",
               "LLaDA2: the layers of Ling 2.0 over blocks of tokens that see each other, a block-diffusion model.",
               frozenset({"llada2_moe_veomni"}), **_LING_FIELDS, is_diffusion=True,
               defaults=_LING_2 | {"block_size": 32, "mask_token_id": 156895, "partial_rotary_factor": 0.5}),
        Family("LLaDAModelLM", "llada",
               "LLaDA: Llama's layers over tokens that all see each other.",
               **_LLADA),
        Family("LLaDAMoEModelLM", "llada",
               "LLaDA-MoE: heads with norms, and experts that a softmax scores, over tokens that all see each other.",
               frozenset({"lladamoe"}), **_LLADA_MOE),
    )
}  # fmt: skip

_READ = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    "partial_rotary_factor", "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "layer_types",
    "quantization_config",
})  # fmt: skip
_WINDOW_FIELDS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})
# Fields that never change a forward pass at inference: training, bookkeeping, generation defaults that Hugging Face
# used to write here (generation_config.json is read instead), pretraining_tp, which splits sums without changing their
# results, and max_window_layers, which has no effect without use_sliding_window.
_INERT = frozenset({
    "attention_dropout", "hidden_dropout", "initializer_range", "use_cache", "pretraining_tp", "transformers_version",
    "_name_or_path", "name_or_path", "_commit_hash", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "tokenizer_class", "prefix", "task_specific_params", "problem_type", "finetuning_task", "id2label", "label2id",
    "num_labels", "torchscript", "use_bfloat16", "tf_legacy_loss", "return_dict", "output_hidden_states",
    "output_attentions", "output_scores", "return_dict_in_generate", "tie_last_hidden_states", "is_decoder",
    "chunk_size_feed_forward", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "model_max_length", "max_sequence_length", "_attn_implementation",
    "attn_implementation", "_attn_implementation_autoset", "unsloth_version", "unsloth_fixed",
    "max_window_layers",
})  # fmt: skip


def family_of(hf: Mapping[str, Any]) -> Family:
    names = hf.get("architectures") or []
    for family in FAMILIES.values():
        if family.architecture in names:
            # Hugging Face chooses the class by model_type, so another family's model_type means another computation.
            if hf.get("model_type", family.model_type) not in {family.model_type, *family.other_model_types}:
                raise UnsupportedConfigError(
                    f"model_type={hf['model_type']!r} does not belong to {family.architecture}, whose model_type is "
                    f"{family.model_type!r}"
                )
            return family
    if not names:
        alike = [family for family in FAMILIES.values() if family.model_type == hf.get("model_type")]
        if len(alike) == 1:
            return alike[0]
        if alike:
            raise UnsupportedConfigError(
                f"model_type={hf['model_type']!r} may be {' or '.join(family.architecture for family in alike)}; "
                "config.json must say which, as architectures"
            )
    found = ", ".join(names) or f"model_type={hf.get('model_type')!r}"
    raise UnsupportedConfigError(f"unknown architecture {found}; supported: {', '.join(FAMILIES)}")


def refuse_active(values: Mapping[str, Any], family: Family) -> None:
    if is_active(values.get("quantization_config")):
        raise UnsupportedConfigError("quantization_config is set: quantized checkpoints are not supported")
    if values.get("use_rmsnorm") is False:
        raise UnsupportedConfigError("use_rmsnorm=False is not supported")
    for name, only in family.fixed.items():
        if values.get(name, only) != only:
            raise UnsupportedConfigError(f"{name}={values[name]!r} is not supported; {only!r} is")
    other = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise UnsupportedConfigError(f"layer_types contains {', '.join(other)}; only full_attention is supported")
    layers = _windowed_layers(values, family)
    if layers:
        raise UnsupportedConfigError(
            f"use_sliding_window gives {len(layers)} of {values['num_hidden_layers']} layers of {family.architecture} "
            f"a window (sliding_window={values['sliding_window']}), which is not supported"
        )


def _windowed_layers(values: Mapping[str, Any], family: Family) -> range:
    """Numbers of the layers that `use_sliding_window` gives a window, where `layer_types` does not decide."""
    if family.windows == "none" or not flag(values, "use_sliding_window") or values.get("sliding_window") is None:
        return range(0)
    num_layers = size(values, "num_hidden_layers")
    if family.windows == "everywhere":
        return range(num_layers)
    if values.get("layer_types") is not None:
        return range(0)
    return range(size(values, "max_window_layers", 0), num_layers)
