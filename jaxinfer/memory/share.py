"""The share of a GPU's memory that the engine takes, and how JAX is told of it before it starts.

JAX reserves a share of each GPU when it starts, and allocates nothing beyond that: 0.75 or, if it is set, the value of
an environment variable.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import jax
from jax._src.xla_bridge import backends_are_initialized

logger = logging.getLogger(__name__)

SHARE_VARIABLE, OLDER_VARIABLE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_DEFAULT_SHARE = 0.75
# CUDA's context and the programs themselves are outside of JAX's share, and JAX cannot start with more than is free.
LARGEST_SHARE = 0.97
# Share of the engine's limit for what is not counted: results of the launch before, the second program of adjusted
# sampling, gaps between arrays. With 256 rows and a vocabulary of 152 thousand the first two are 0.3 GB beside the
# largest step.
RESERVED = 0.03

_set_here: str | None = None  # the value that this process has given the variable, to tell it from a user's


def check_utilization(gpu_memory_utilization: float) -> None:
    """Raise a ValueError that names the value unless it is in (0, 1]."""
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}")


def share_in_environment() -> float | None:
    """Return the share of a GPU that an environment variable gives to JAX; None if none is set.

    Raises:
        ValueError: it is not a number in (0, 1], or both variables are set, which JAX refuses.
    """
    given = {name: os.environ[name] for name in (SHARE_VARIABLE, OLDER_VARIABLE) if os.environ.get(name)}
    if len(given) == 2:
        raise ValueError(f"{SHARE_VARIABLE} and {OLDER_VARIABLE} are both set: set the first alone")
    for name, text in given.items():
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ValueError(f"{name} must be a number in (0, 1], got {text!r}")
        return share
    return None


def engine_share(gpu_memory_utilization: float, jax_share: float | None) -> float:
    """Return the share of a GPU that the engine takes: the requested one, up to JAX's.

    Args:
        jax_share: JAX's share; None if the engine may choose it.
    """
    return min(gpu_memory_utilization, LARGEST_SHARE if jax_share is None else jax_share)


def set_jax_share(gpu_memory_utilization: float) -> None:
    """Let JAX start with the engine's share of each GPU, unless JAX runs, a user has set a share, or no GPU is usable.

    Raises:
        ValueError: as for `check_utilization` and `share_in_environment`.
    """
    global _set_here
    check_utilization(gpu_memory_utilization)
    if backends_are_initialized() or not _may_use_gpu():
        return
    if share_in_environment() is None or _is_set_here():
        _set_here = str(float(engine_share(gpu_memory_utilization, None)))
        os.environ[SHARE_VARIABLE] = _set_here


def engine_limit(bytes_limit: int, gpu_memory_utilization: float) -> int:
    """Return the bytes of a GPU that the engine may use; log a warning if it is less than requested, unless a user has
    set JAX's share.

    Args:
        bytes_limit: from `device.memory_stats()`: JAX's share of the card in bytes. The card's size follows from it and
            from that share, which is the environment's or else JAX's default.

    Raises:
        ValueError: as for `share_in_environment`.
    """
    chosen = share_in_environment()
    jax_share = JAX_DEFAULT_SHARE if chosen is None else chosen
    share, wanted = engine_share(gpu_memory_utilization, jax_share), engine_share(gpu_memory_utilization, None)
    if share < wanted and (chosen is None or _is_set_here()):
        _warn_too_late(share, wanted)
    return int(bytes_limit * (share / jax_share))


def reserve_of(limit_bytes: int) -> int:
    """Return the bytes of the engine's limit that are kept free for what is not counted."""
    return int(limit_bytes * RESERVED)


def _may_use_gpu() -> bool:
    """Whether JAX is allowed to start on a GPU and has a plugin of any kind; starts nothing."""
    platforms = jax.config.jax_platforms  # such as "cuda,cpu"; None or "": any
    allowed = not platforms or bool({"cuda", "gpu"} & {name.strip() for name in platforms.split(",")})
    return allowed and importlib.util.find_spec("jax_plugins") is not None


def _is_set_here() -> bool:
    return _set_here is not None and os.environ.get(SHARE_VARIABLE) == _set_here


@functools.cache  # one warning for all engines of a process
def _warn_too_late(share: float, wanted: float) -> None:
    logger.warning(
        "JAX runs already, with %g of each GPU's memory: the engine takes no more than that. For the %g that "
        "gpu_memory_utilization asks for, set %s=%g before the start, or make the LLM before anything else uses JAX.",
        share, wanted, SHARE_VARIABLE, wanted,
    )  # fmt: skip
