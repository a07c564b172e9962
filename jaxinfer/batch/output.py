"""The file of answers: a run that was killed leaves it, and the next one continues it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from jaxinfer.batch.lines import Line

_BLOCK = 1 << 20


class Output:
    """A file that grows by whole lines, one for each line of the input, in its order.

    What a killed process has written may end within a line: that part is cut off. So the number of its lines says where
    to continue. One process at a time has the file.

    Args:
        path: of the file; it is made if it is missing.

    Raises:
        RuntimeError: another process writes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise RuntimeError(f"{self.path} is written by another process") from error
        self._cut()

    def _cut(self) -> None:
        """Cut off what follows the last end of a line."""
        end = self._file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            self._file.seek(start)
            found = self._file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)

    def check(self, lines: Iterable[Line]) -> int:
        """Return how many lines there are.

        Args:
            lines: of the input, from its beginning.

        Raises:
            ValueError: the answers are not those of these lines.
        """
        count = 0
        asked = iter(lines)
        with self.path.open("rb") as file:
            for count, raw in enumerate(file, start=1):
                line = next(asked, None)
                try:
                    custom_id: Any = json.loads(raw)["custom_id"]
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(f"{self.path} is no file of answers: line {count} has no custom_id") from error
                if line is None or custom_id != line.custom_id:
                    wanted = "none" if line is None else repr(line.custom_id)
                    raise ValueError(
                        f"{self.path} has the answers of another file: line {count} is for {custom_id!r}, the input "
                        f"has {wanted} there"
                    )
        return count

    def append(self, answer: dict[str, Any]) -> None:
        """Write one line."""
        raw = memoryview(json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        while raw:
            raw = raw[self._file.write(raw) :]

    def close(self) -> None:
        """Have the system write everything to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
