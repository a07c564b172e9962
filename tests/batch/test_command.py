"""`jaxinfer batch` itself: every endpoint, and kill -9 at random moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxinfer import LLM
from jaxinfer.cli.main import main

SMALL = (
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "128",
    "--kv-cache-tokens",
    "4096",
)
KINDS = {
    "/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion", "/v1/responses": "response",
}  # fmt: skip
QUESTIONS = ["How old is the lighthouse?", "Who works in the library?", "Are you a robot?"]


def write(path: Path, count: int) -> None:
    lines = []
    for number in range(count):
        question = [{"role": "user", "content": QUESTIONS[number % 3]}]
        url, body = [
            ("/v1/chat/completions", {"messages": question, "max_tokens": 12, "temperature": number % 2}),
            ("/v1/completions", {"prompt": f"Once {number}", "max_tokens": 9, "temperature": 1.0}),
            ("/v1/responses", {"input": QUESTIONS[number % 3], "max_output_tokens": 16, "temperature": 1.0}),
        ][number % 3]
        lines.append({"custom_id": f"id {number}", "method": "POST", "url": url, "body": body})
    lines[5]["body"] = {"messages": "no"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_endpoint_is_answered_as_offline(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, 9)
    assert main(["batch", str(source), str(target), *SMALL]) == 0
    assert "9 lines answered, 1 of them with errors" in capsys.readouterr().err
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [f"id {number}" for number in range(9)]
    bodies = [each["response"]["body"] for each in found]
    urls = [json.loads(line)["url"] for line in source.read_text().splitlines()]
    for number, (url, body) in enumerate(zip(urls, bodies, strict=True)):
        assert number == 5 or body["object"] == KINDS[url]
    assert set(urls) == set(KINDS)
    assert found[5]["response"]["status_code"] == 400 and "messages" in found[5]["error"]["message"]
    llm = LLM(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128, kv_cache_tokens=4096)
    [output] = llm.chat(
        [{"role": "user", "content": QUESTIONS[0]}],
        llm.default_sampling_params(max_tokens=12, temperature=0.0),
        use_tqdm=False,
    )
    assert bodies[0]["choices"][0]["message"]["content"] == output.outputs[0].text
    before = target.read_bytes()
    assert main(["batch", str(source), str(target), *SMALL]) == 0
    assert "0 lines answered, 0 of them with errors, 9 were answered before" in capsys.readouterr().err
    assert target.read_bytes() == before


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_run_is_continued_to_the_same_file(kills, tmp_path):
    source, whole, target = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write(source, 60)
    rng, count = random.Random(kills), 0
    start = [sys.executable, "-m", "jaxinfer", "batch", str(source)]
    command = [*start, str(target), *SMALL, "--concurrency", "4"]
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    assert subprocess.run([*start, str(whole), *SMALL], env=environment, check=False).returncode == 0
    while count < kills:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = target.stat().st_size if target.exists() else 0
        while process.poll() is None and (not target.exists() or target.stat().st_size <= before):
            time.sleep(0.01)  # it loads
        time.sleep(rng.random() * 0.1)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            count += 1
        process.wait()
        if target.read_bytes().count(b"\n") == 60:
            target.unlink()
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert target.read_bytes() == whole.read_bytes()
