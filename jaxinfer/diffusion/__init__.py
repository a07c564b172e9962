"""Diffusion language models: blocks of tokens that are denoised in rounds."""
