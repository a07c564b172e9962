"""The OpenAPI document against what is answered, by schemathesis: no 500, declared statuses, types and bodies, keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.processes import SMALL, Server, serving

_CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "ignored_auth",
)  # fmt: skip
# Answers of a few tokens: it is bodies that are looked at.
_CONTEXT = ("--max-model-len", "64")
# Seconds of patience for an answer: a request may be the first to need a program.
_COMPILES = "60"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(*SMALL, *_CONTEXT, key="secret") as found:
        yield found


@pytest.mark.parametrize("seconds", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_every_endpoint_answers_as_its_document_says(guarded, seconds, tmp_path):
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{guarded.url}/openapi.json", "--phases",
        "examples,coverage,fuzzing", "--checks", ",".join(_CHECKS), "-H", "Authorization: Bearer secret",
        "--max-time", str(seconds), "-w", "1", "--include-path-regex", "^/(v1|tokenize|detokenize|abort|reset|health)",
        "--generation-deterministic", "--no-color", "--request-timeout", _COMPILES,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    cases = re.search(r"(\d+) generated", run.stdout)
    assert cases is not None and int(cases[1]) > 20, run.stdout[-3000:]
    guarded.until(guarded.is_idle)
