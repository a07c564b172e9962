"""Small models for tests of training."""

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts_config import ExpertsConfig

EXPERTS = ExpertsConfig(
    num_experts=8, experts_per_token=3, intermediate_size=8, shared_size=16, dense_layers=(0,), score="sigmoid",
    has_bias=True, num_groups=4, kept_groups=2,
)  # fmt: skip


def dense_config(*, hidden_size: int, head_dim: int, num_layers: int) -> ModelConfig:
    """What mixtures are made from."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=hidden_size, intermediate_size=16,
        num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=head_dim, max_position_embeddings=64,
        tie_word_embeddings=True, qk_norm=True,
    )  # fmt: skip
