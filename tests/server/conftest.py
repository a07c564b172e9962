"""One server for the tests that share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.processes import SMALL, Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of the embedded model, with a key."""
    with serving(*SMALL, key="secret") as found:
        yield found
        assert found.is_idle()
