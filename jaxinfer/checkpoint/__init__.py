"""Checkpoints: conversion from Hugging Face to Orbax, loading onto a mesh, and export."""

from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.checkpoint.directory import read_config, read_generation_config
from jaxinfer.checkpoint.eagle3 import load_head
from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.export import export_hf
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel

__all__ = [
    "CheckpointError",
    "convert_checkpoint",
    "export_hf",
    "for_tensor_parallel",
    "load_checkpoint",
    "load_head",
    "read_config",
    "read_generation_config",
]
