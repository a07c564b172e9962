"""`jaxinfer bench serve` against the server itself."""

from __future__ import annotations

import json

import pytest

from jaxinfer.cli.main import main


@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--endpoint", "completions", "--vocab-size", "500"]])
def test_every_token_of_a_run_is_counted(server, tmp_path, options):
    file = tmp_path / "result.json"
    before = server.gauges()["jaxinfer:generation_tokens_total"]
    given = ["--base-url", f"{server.url}/v1", "--api-key", "secret", "--num-requests", "6", "--input-len", "8:24"]
    given += ["--output-len", "5:9", "--ignore-eos", "--concurrency", "3", "--usage-in-pieces", "--json", str(file)]
    assert main(["bench", "serve", *given, *options]) == 0
    found = json.loads(file.read_text())
    results = found["results"]
    assert found["settings"]["model"] == "tiny" and results["num_requests"] == 6 and results["num_failed"] == 0
    assert results["output_tokens"] == server.gauges()["jaxinfer:generation_tokens_total"] - before >= 30
    assert results["prompt_tokens"] >= 6 * 8
    if "--no-stream" not in options:
        first, latency = results["time_to_first_token"], results["latency"]
        assert 0 < first["mean"] < latency["mean"] and results["inter_token_latency"] is not None
