"""Settings of a server."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.server.parse.formats import FORMATS, HARMONY

WARM_UPS = ("full", "background", "off")
# Least values of settings.
_LEAST = {
    "max_waiting_requests": 0, "max_waiting_tokens": 0, "max_body_bytes": 1, "max_stored_responses": 0,
    "max_stored_bytes": 0, "shutdown_timeout": 0, "read_timeout": 0.001, "request_timeout": 0.001,
    "heartbeat_seconds": 0.001,
}  # fmt: skip


@dataclass(frozen=True)
class ServerSettings:
    """What `jaxinfer serve` is told besides the engine's arguments.

    Args:
        host, port: where it listens; port 0 is a free one.
        api_keys: any of them is accepted. None: no key is asked for.
        allow_unauthenticated: listen on other addresses than this machine's own without a key.
        served_model_names: names of the model in requests and answers; the first one is in the answers.
        max_waiting_requests: further requests are refused while so many wait for a seat.
        max_waiting_tokens: the same, in tokens of their prompts; None: any number.
        max_body_bytes: most bytes of a request's body.
        max_stored_responses: most responses that are kept for each key, those that were used latest; 0: none.
        max_stored_bytes: most bytes of them for each key, their conversations counted.
        shutdown_timeout: seconds that running requests have after the first signal.
        read_timeout: seconds after which a client that takes nothing of its answer is given up.
        request_timeout: seconds after which a request ends as if it had reached its length; None: never.
        heartbeat_seconds: after so long without an event, a stream gets a comment.
        page: serve the page for people at `/`.
        cors_origins: from which pages in browsers may ask.
        log_requests: log a line for each request, without anything of its text.
        tool_call_parser: the format of the model's tool calls; empty: found in its chat template.
        reasoning_parser: "think": the model reasons within <think> tags; empty: if its chat template has them.
        warm_up: "full": compile every program before requests are taken; "background": the likely ones, and the others
            beside requests; "off": each when it is needed.
        debug_endpoints: serve /debug/engine, which counts what the engine holds.
        weights_endpoints: serve /pause, /resume and /update_weights, which reads directories where the server runs.
        kv_events_endpoint: where events of the prefix cache are published, as "tcp://127.0.0.1:5557"; empty: nowhere.
        kv_events_replay_endpoint: where a subscriber asks for what it has missed; empty: nowhere.
        kv_events_topic: the topic of these events.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    allow_unauthenticated: bool = False
    served_model_names: Sequence[str] = ()
    max_waiting_requests: int = 1024
    max_waiting_tokens: int | None = None
    max_body_bytes: int = 8 << 20
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 << 20
    shutdown_timeout: float = 30.0
    read_timeout: float = 60.0
    request_timeout: float | None = None
    heartbeat_seconds: float = 15.0
    page: bool = True
    cors_origins: Sequence[str] = ()
    log_requests: bool = False
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    warm_up: str = "background"
    debug_endpoints: bool = False
    weights_endpoints: bool = False
    kv_events_endpoint: str = ""
    kv_events_replay_endpoint: str = ""
    kv_events_topic: str = ""
    _digests: tuple[bytes, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must be 0 to 65535, got {self.port}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least {least}, got {value}")
        if any(not key for key in self.api_keys):
            raise ValueError("api_keys has an empty key")
        if self.warm_up not in WARM_UPS:
            raise ValueError(f"warm_up must be one of {', '.join(WARM_UPS)}, got {self.warm_up!r}")
        known = (*FORMATS, HARMONY.name)
        if self.tool_call_parser and self.tool_call_parser not in known:
            raise ValueError(f"tool_call_parser must be one of {', '.join(known)}, got {self.tool_call_parser!r}")
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ValueError("kv_events_replay_endpoint needs kv_events_endpoint")
        if self.reasoning_parser not in ("", "think"):
            raise ValueError(f"reasoning_parser must be think, got {self.reasoning_parser!r}")
        if not (self.api_keys or self.allow_unauthenticated or _is_own(self.host)):
            raise ValueError(
                f"host {self.host} can be reached from other machines: give --api-key, or --allow-unauthenticated"
            )
        object.__setattr__(self, "_digests", tuple(_digest(key) for key in self.api_keys))

    def owner(self, key: str | None) -> str | None:
        """Return a short name of a key's owner; None: the key is not accepted."""
        if not self._digests:
            return ""
        given = _digest(key or "")
        # All are compared, so that the time says nothing about which one is nearly right.
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex()[:16] if key and any(found) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _is_own(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
