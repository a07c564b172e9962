"""Peak memory of a conversion, in a process of its own: prints the growth of the peak in bytes, as JSON.

Arguments: the source, the destination, and a small checkpoint that is converted first, so that imports and buffers
that do not grow with the model are not counted.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from jaxinfer.checkpoint import convert_checkpoint


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(source: str, destination: str, small: str) -> None:
    convert_checkpoint(small, Path(destination).with_name("warm-up"), progress=False)
    before = peak_bytes()
    start = time.perf_counter()
    convert_checkpoint(source, destination, progress=False)
    seconds = time.perf_counter() - start
    print(json.dumps({"before": before, "growth": peak_bytes() - before, "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
