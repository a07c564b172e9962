"""The engine's thread and the event loops that read its outputs."""

from __future__ import annotations

import asyncio
import threading

from jaxinfer.frontend.engine_thread import OutputReader, _wake
from jaxinfer.frontend.mailbox import Mailbox


def test_outputs_are_taken_once_all_woken_readers_have_run():
    async def main() -> None:
        loop, taken = asyncio.get_running_loop(), threading.Event()
        readers = [OutputReader(name, name, Mailbox(name), loop) for name in "abc"]
        seen: list[tuple[str, bool]] = []

        async def read(reader: OutputReader) -> None:
            await reader.event.wait()
            seen.append((reader.name, taken.is_set()))

        tasks = [asyncio.create_task(read(reader)) for reader in readers]
        await asyncio.sleep(0)
        _wake(loop, readers, taken)
        assert await asyncio.to_thread(taken.wait, 10)
        assert seen == [("a", False), ("b", False), ("c", False)]
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_closed_loop_is_not_woken():
    loop, taken = asyncio.new_event_loop(), threading.Event()
    loop.close()
    _wake(loop, [], taken)
    assert not taken.is_set()
