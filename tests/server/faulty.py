"""A server whose engine fails: `python -m tests.server.faulty once|always|loading OPTIONS OF SERVE`.

once: the tenth step raises, and the engine recovers. always: recovery raises too. loading: the model loads for ever.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from jaxinfer.cli.main import main
from jaxinfer.engine.core import EngineCore
from jaxinfer.server import run

FAILING_STEP = 10


def fail(*, always: bool) -> None:
    """Let the engine fail from now on."""
    advance, count = EngineCore._advance, 0

    def failing(self: Any) -> None:
        nonlocal count
        count += 1
        if count == FAILING_STEP or (always and count > FAILING_STEP):
            raise RuntimeError("injected")
        advance(self)

    EngineCore._advance = failing
    if always:

        def recover(self: Any) -> None:
            raise RuntimeError("injected in a recovery")

        EngineCore._recover = recover


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "loading":
        run.AsyncLLM = lambda **_: threading.Event().wait()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        fail(always=kind == "always")
    sys.exit(main(["serve", *rest]))
