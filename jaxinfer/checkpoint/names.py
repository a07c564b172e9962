"""Publishers' names of a model's tensors, by family."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Names:
    """Publishers' names of a model's tensors; names of a layer's tensors follow the prefix `layer`."""

    embeddings: str = "model.embed_tokens"
    layer: str = "model.layers.{i}."
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn."
    qkv: str | None = None  # q, k and v in one tensor
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"
    attention_gate: str = "gate_proj"
    attention_result_norm: str = "post_attention_layernorm"  # of families whose results are normed
    post_attention_norm: str = "post_attention_layernorm"  # before the MLP
    mlp: str = "mlp."
    gate_up: str | None = None  # gate and up in one tensor
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    mlp_result_norm: str = "post_feedforward_layernorm"
    scalar: str = "layer_scalar"
    router: str = "mlp.gate.weight"
    choice_bias: str = "mlp.gate.expert_bias"
    logit_bias: str = "mlp.router.bias"
    experts: str = "mlp.experts."
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    inputs_first: bool = False  # kernels of experts are stored with their inputs first, gates and factors by turns
    is_beside_mlp: bool = False  # layers with experts have an MLP too
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate.weight"


_LLAMA = Names()
_GEMMA = Names(post_attention_norm="pre_feedforward_layernorm")
_MIXTRAL = Names(
    router="block_sparse_moe.gate.weight", choice_bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts.", expert_gate="w1", expert_up="w3", expert_down="w2",
)  # fmt: skip
NAMES = {
    "llama": _LLAMA,
    "bailing": Names(
        embeddings="model.word_embeddings", attention="attention.", qkv="query_key_value", o="dense",
        q_norm="query_layernorm", k_norm="key_layernorm",
    ),
    "llada": Names(
        embeddings="model.transformer.wte", layer="model.transformer.blocks.{i}.", final_norm="model.transformer.ln_f",
        head="model.transformer.ff_out", input_norm="attn_norm", attention="", o="attn_out",
        post_attention_norm="ff_norm", mlp="", gate="ff_proj", up="up_proj", down="ff_out",
    ),
    "llada_moe": Names(shared="shared_expert."),
    "phi3": Names(qkv="qkv_proj", gate_up="gate_up_proj"),
    "glm4": Names(
        attention_result_norm="post_self_attn_layernorm", mlp_result_norm="post_mlp_layernorm", gate_up="gate_up_proj",
    ),
    "olmo2": _LLAMA,
    "hunyuan": Names(q_norm="query_layernorm", k_norm="key_layernorm"),
    "gemma": replace(
        _GEMMA, is_beside_mlp=True, router="router.proj.weight", experts="experts.",
    ),
    "muse": _GEMMA,
    "qwen2_moe": Names(shared="mlp.shared_expert."),
    "mixtral": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "glm4_moe": Names(choice_bias="mlp.gate.e_score_correction_bias"),
    "laguna": Names(
        choice_bias="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert.", attention_gate="g_proj",
    ),
    "gpt_oss": Names(router="mlp.router.weight", inputs_first=True),
}  # fmt: skip
