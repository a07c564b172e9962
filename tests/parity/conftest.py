"""The live comparison needs torch, which the default environment does not have; without it these tests are skipped."""

import subprocess

import pytest


@pytest.fixture(scope="session", autouse=True)
def _needs_torch() -> None:
    from tests.parity.test_live import PYTHON

    found = (
        PYTHON.exists() and subprocess.run([PYTHON, "-c", "import torch, transformers"], check=False).returncode == 0
    )
    if not found:
        pytest.skip(f"{PYTHON} has no torch and transformers: make venv-parity")
