"""Results of Hugging Face's torch implementations, and how this engine's compare with them."""
