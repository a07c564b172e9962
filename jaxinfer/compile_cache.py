"""The persistent cache of compiled programs: what one process compiled, the next one loads."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def enable_compile_cache() -> None:
    """Keep compiled programs on disk, unless the user has chosen a place (or none) through JAX's own settings."""
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(home) / "jaxinfer" / "compiled"))
    # An engine's programs are few and all wanted again: none is too quick to compile or too small to keep.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keeps_compiled_programs() -> bool:
    """Whether what is compiled now is there for the next process."""
    return bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)
