"""Ling, whose architecture is called bailing_moe: autoregressive mixtures of experts, in two versions."""

from jaxinfer.models.decoder import DecoderLM


class BailingMoeForCausalLM(DecoderLM):
    """Ling: Llama's attention, experts that a softmax scores, and shared ones."""


class BailingMoeV2ForCausalLM(DecoderLM):
    """Ling 2.0: heads with norms, rotated in part; experts that a sigmoid scores, chosen by groups with a bias."""
