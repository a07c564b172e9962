"""Options of a process that shares a model with others, maybe on other hosts."""

from __future__ import annotations

import argparse
import logging
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

HOSTS_OPTIONS = ("coordinator_address", "num_processes", "process_id")


def add_hosts_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("several processes, one model (docs/guides/scale.md)")
    group.add_argument(
        "--coordinator-address", metavar="HOST:PORT", help="address of the first process; all take the same options"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="N", help="number of this one; 0 has the requests")


def takes_part(args: argparse.Namespace, options: Mapping[str, Any]) -> bool:
    """Join the other processes, if there are any. After the first one, follow it until it ends, and return True.

    A first signal does not end a process that follows: it ends with the first one.

    Args:
        options: of the engine, as `LLM` takes them.

    Raises:
        ValueError: an option is missing, or out of range.
        LostProcessError: the first process is lost.
    """
    given = [getattr(args, name) for name in HOSTS_OPTIONS]
    if all(value is None for value in given):
        return False
    if missing := [
        f"--{name.replace('_', '-')}" for name, value in zip(HOSTS_OPTIONS, given, strict=True) if value is None
    ]:
        raise ValueError(f"{' and '.join(missing)} must be given too")
    from jaxinfer.hosts.following import follow
    from jaxinfer.hosts.team import join
    from jaxinfer.llm import LLM

    if join(*given).leads:
        return False

    def first_signal(number: int, frame: FrameType | None) -> None:
        logger.info("process %d ends with process 0; another signal ends it at once", args.process_id)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, first_signal)
    llm = LLM(**options)
    logger.info("process %d of %d follows process 0", args.process_id, args.num_processes)
    follow(llm.core)
    return True
