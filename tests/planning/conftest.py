"""Where the configurations of real models lie."""

from pathlib import Path

import pytest

CONFIGS = Path(__file__).resolve().parent.parent / "fixtures" / "configs"


@pytest.fixture
def configs() -> Path:
    """Holds a directory with a config.json for each of a few models."""
    return CONFIGS
