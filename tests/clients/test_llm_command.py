"""The server with `llm`, a person's client of the command line, in an environment of its own (`make test-clients`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.processes import SMALL, Server, serving

COMMAND = Path(__file__).resolve().parents[2] / ".venv-clients" / "bin" / "llm"
QUESTION = "How old is the lighthouse?"


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with serving(*SMALL) as found:
        yield found


@pytest.fixture
def llm(tiny, tmp_path) -> Callable[..., str]:
    """(arguments) -> what the command prints."""
    about = {
        "model_id": "tiny", "model_name": "tiny", "api_base": f"{tiny.url}/v1", "can_stream": True,
        "supports_schema": True, "supports_tools": True,
    }  # fmt: skip
    (tmp_path / "extra-openai-models.yaml").write_text(f"[{json.dumps(about)}]")

    def run(*arguments: str) -> str:
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        command = [str(COMMAND), "-m", "tiny", QUESTION, "--no-log", "-o", "temperature", "0", *arguments]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


def test_streams_and_whole_answers_are_those_of_the_server(tiny, llm):
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    answer = tiny.json("POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    limit = ("-o", "max_tokens", "24")
    assert llm(*limit).strip() == llm("--no-stream", *limit).strip() == answer.strip()


def test_a_schema_is_kept_to(llm):
    name, age = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {
        "type": "object",
        "properties": {"name": name, "age": age},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = json.loads(llm("--schema", json.dumps(schema), "-o", "max_tokens", "200"))
    assert set(found) == {"name", "age"} and 0 <= found["age"] <= 99
