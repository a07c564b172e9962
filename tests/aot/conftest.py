"""Shared by the tests that compile for a GPU: what ptxas says of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.aot.ptxas import VARIABLE, KernelReport, read_reports


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file with the same parameters go to the same process: what they all read is compiled once.

    The largest groups come first, and what takes longest is among them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByParameters(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            return f"{file}[{test.partition('[')[2]}"

    return ByParameters(config, log)


@pytest.fixture(scope="session", autouse=True)
def nothing_kept(compiled_programs: None) -> None:
    """What is compiled for a device that is not there can be kept on disk, but not read again."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture
def ptxas(capfd, monkeypatch) -> Callable[[], list[KernelReport]]:
    """() -> the reports on the kernels that were compiled since the test began, or since it last asked."""
    monkeypatch.setenv(VARIABLE, "1")
    return lambda: read_reports(capfd.readouterr().out)
