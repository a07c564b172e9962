"""Benchmarks on the CPU: random models, and this engine against Hugging Face's ways to generate."""
