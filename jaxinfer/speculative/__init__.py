"""Speculative decoding: several tokens from one step of the target model."""
