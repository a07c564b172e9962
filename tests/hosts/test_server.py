"""`jaxinfer serve` of two processes that share a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from jaxinfer import LLM, SamplingParams
from tests.server.processes import SMALL, free_port, serving

BODY = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0.0}


def test_a_server_answers_as_one_process_and_ends_its_streams_when_another_process_is_lost(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    shared = [
        *SMALL, "--tensor-parallel-size", "2", "--num-processes", "2",
        "--coordinator-address", f"127.0.0.1:{free_port()}",
    ]  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-m", "jaxinfer", "serve", *shared, "--process-id", "1"]
    other = subprocess.Popen(command, env=environment)
    try:
        with serving(*shared, "--process-id", "0") as server:
            found = server.json("POST", "/v1/completions", {**BODY, "max_tokens": 20})
            other.send_signal(signal.SIGTERM)  # it ends with the first process
            again = server.json("POST", "/v1/completions", {**BODY, "max_tokens": 20})
            assert other.poll() is None
            stream = server.send("/v1/completions", {**BODY, "max_tokens": 900, "ignore_eos": True, "stream": True})
            received = stream.recv(1 << 12)
            other.kill()
            while piece := stream.recv(1 << 16):
                received += piece
            assert b'"code":"dead"' in received
            assert server.process.wait(timeout=60) == 3
    finally:
        other.kill()
        other.wait()
    llm = LLM(max_num_seqs=8, max_num_batched_tokens=256, kv_cache_tokens=8192)
    [output] = llm.generate(BODY["prompt"], SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    for each in (found, again):
        assert each["choices"][0]["text"] == output.outputs[0].text
