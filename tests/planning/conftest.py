"""The folder of configurations of real models, and targets that need no compiler for GPUs."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.planning.compile_target import CompileTarget
from jaxinfer.planning.devices import GPU

CONFIGS = Path(__file__).resolve().parent.parent / "fixtures" / "configs"


@pytest.fixture
def configs() -> Path:
    """Holds a directory with a config.json for each of a few models."""
    return CONFIGS


@pytest.fixture
def stand_in() -> Callable[[GPU], CompileTarget]:
    """A target that says that it is a GPU, and whose programs are compiled for this machine's CPU."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("tensor",))
    return lambda gpu, num_devices=1: CompileTarget(gpu, mesh)
