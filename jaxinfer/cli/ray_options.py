"""Options of replicas under Ray."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.hosts_options import HOSTS_OPTIONS

if TYPE_CHECKING:
    from jaxinfer.server.settings import ServerSettings


def add_ray_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options, and return their group."""
    group = parser.add_argument_group("Ray (extra `ray`)")
    group.add_argument("--ray", action="store_true", help="run replicas under Ray: that of RAY_ADDRESS, or a local one")
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="number of engines (default: 1)")
    return group


def serve_with_ray(args: argparse.Namespace, settings: ServerSettings, options: Mapping[str, Any]) -> int:
    """Serve replicas under Ray until a signal; returns the process's exit code."""
    from jaxinfer.integrations.ray_serve import run

    if not args.port:
        raise ValueError("--ray needs a --port: Ray does not tell which one is free")

    def wait_for_a_signal() -> None:
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # only now: Ray has set handlers of its own
            signal.signal(number, lambda *_: ended.set())
        ended.wait()

    run(
        options, settings, model=args.model or "tiny", routing=args.ray_routing, replicas=args.replicas,
        wait=wait_for_a_signal,
    )  # fmt: skip
    return 0


def check_ray_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together."""
    if args.replicas < 1:
        raise ValueError(f"--replicas must be at least 1, got {args.replicas}")
    if args.replicas > 1 and not args.ray:
        raise ValueError("--replicas needs --ray")
    if args.ray and any(getattr(args, name) is not None for name in HOSTS_OPTIONS):
        raise ValueError("--ray starts its processes itself: leave out --coordinator-address, and what comes with it")
