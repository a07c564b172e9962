"""Servers for the tests that share them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.processes import SMALL, Server, serving
from tests.server.talking import write_talking


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of the embedded model, with a key."""
    with serving(*SMALL, key="secret") as found:
        yield found
        assert found.is_idle()


@pytest.fixture(scope="session")
def talking(tmp_path_factory) -> Iterator[Server]:
    """A server of the embedded weights with a chat template that has tools and reasoning."""
    directory = tmp_path_factory.mktemp("talking") / "tiny"
    write_talking(directory)
    with serving(str(directory), *SMALL, "--served-model-name", "tiny") as found:
        yield found
        assert found.is_idle()
