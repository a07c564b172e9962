"""Memory of a training in huge pages."""

from __future__ import annotations

import os
import sys

# A step allocates and returns a gigabyte; in pages of 4 kB the kernel's part of that is a fifth of the time. glibc
# reads this when a process starts.
HUGE_PAGES = "glibc.malloc.hugetlb=1"


def begin_with_huge_pages() -> None:
    """Begin the running script once more with huge pages, if it does not have them. Results are the same, bit for
    bit."""
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.argv])
