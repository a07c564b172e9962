"""Draws the server's page: starts servers of the embedded models, drives the page in Chromium, and saves pictures.

    npm install --prefix build/playwright playwright-core
    .venv/bin/python scripts/draw_page.py --playwright build/playwright --out build/page

Every scene is drawn in a wide and a narrow window, light and dark.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRIVER = Path(__file__).resolve().parent / "page_pictures" / "drive.mjs"
LISTENING, READY = re.compile(r"listening on (http://\S+)"), re.compile(r": ready")
LIMITS = ["--port", "0", "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--kv-cache-tokens", "8192"]
# Scenes by the options of the server that they are drawn of. Drafts are made whether they pay on this machine or not.
SERVERS = {
    ("--speculative-config", '{"method": "draft_model", "adaptive": null}'): [
        "start", "chat", "plan", "both", "json", "refused", "key", "loading",
    ],
    ("tiny-diffusion",): ["diffusion"],
}  # fmt: skip


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """A server that takes requests; yields its address."""
    command = [sys.executable, "-m", "jaxinfer", "serve", *options, *LIMITS, "--warm-up", "off"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if found := LISTENING.search(line):
                address = found[1]
            if READY.search(line):
                break
        else:
            raise RuntimeError("the server has ended")
        yield address
    finally:
        process.terminate()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--playwright", type=Path, required=True, help="folder whose node_modules has playwright-core")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser (default: on the path)")
    parser.add_argument("--out", type=Path, default=Path("build/page"), help="folder of the pictures")
    parser.add_argument("--scenes", nargs="+", metavar="SCENE", help="only these")
    args = parser.parse_args()
    if not args.chromium:
        parser.error("no chromium on the path: give --chromium")
    args.out.mkdir(parents=True, exist_ok=True)
    for options, scenes in SERVERS.items():
        wanted = [scene for scene in scenes if not args.scenes or scene in args.scenes]
        if not wanted:
            continue
        with serving(*options) as address:
            command = ["node", str(DRIVER), str(args.playwright.resolve()), args.chromium, address, str(args.out)]
            subprocess.run([*command, *wanted], check=True)


if __name__ == "__main__":
    main()
