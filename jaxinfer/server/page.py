"""The page for people at `/`: one file, and headers that let it run and reach nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from jaxinfer.server.events import Reply
from jaxinfer.server.packages import App, HttpRequest

_INLINE = re.compile(rb"<(style|script)>(.*?)</\1>", re.DOTALL)


class Page:
    """Handler that serves the page. It has no secrets, and asks for a key itself where the server wants one.

    Raises:
        FileNotFoundError: the package was installed without it.
    """

    def __init__(self) -> None:
        self._body = (files("jaxinfer.server") / "page.html").read_bytes()
        self._headers = {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy(self._body),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",
        }

    async def serve(self, request: HttpRequest) -> App:
        return Reply(self._body, headers=self._headers)


def policy(body: bytes) -> str:
    """Return the content security policy of a page: its own inline style and script, and requests to its server."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _INLINE.findall(body):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        hashes[kind.decode()].append(f"'sha256-{digest}'")
    return "; ".join([
        "default-src 'none'", f"style-src {' '.join(hashes['style'])}", f"script-src {' '.join(hashes['script'])}",
        "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ])  # fmt: skip
