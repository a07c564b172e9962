"""Speculative decoding as published, over any language model."""
