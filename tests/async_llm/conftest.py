"""The engines of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxinfer import LLM, AsyncLLM
from tests.async_llm.builders import LIMITS


@pytest.fixture(scope="package")
def llm() -> LLM:
    return LLM(**LIMITS)


@pytest.fixture(scope="package")
def engine() -> Iterator[AsyncLLM]:
    """Shared by tests that leave it as it was."""
    found = AsyncLLM(**LIMITS, scheduling_policy="priority")
    yield found
    found._stop()
