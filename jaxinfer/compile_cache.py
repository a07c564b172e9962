"""Persistent cache of compiled programs: a process loads what an earlier one has compiled."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def enable_compile_cache() -> None:
    """Keep compiled programs on disk, unless JAX's own settings name a directory or turn the cache off."""
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(home) / "jaxinfer" / "compiled"))
    # An engine has few programs and needs all of them again, however small or quick to compile they are.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keeps_compiled_programs() -> bool:
    """Whether programs compiled now are kept for the next process."""
    return bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)
