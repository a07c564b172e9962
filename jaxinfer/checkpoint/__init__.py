"""Hugging Face checkpoints in, Orbax checkpoints out, models onto a mesh."""
