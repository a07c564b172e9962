"""Settings of the whole test run: the platform, the long variants, and how Hypothesis looks for examples."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax

import pytest
from hypothesis import HealthCheck, settings

# Compiling in the first example would look like a slow one; no deadlines, and the same examples in every run.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the long variants too (tests marked slow)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or "slow" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="a long variant: run it with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
