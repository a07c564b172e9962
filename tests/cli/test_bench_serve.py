"""`jaxinfer bench serve` from the command line to its JSON, against a server whose answers are scripted."""

import json

import pytest

from jaxinfer.cli.main import main
from tests.bench.toy_server import END, HEAD, chunk, delta, toy_server, usage, whole

# What OpenAI's own API knows of a conversation, of what this command may send.
OF_OPENAI = {"model", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options"}
SUMMARIES = {
    "time_to_first_token", "time_per_output_token", "inter_token_latency", "time_between_pieces", "latency",
}  # fmt: skip


def script(body):
    if not body.get("stream"):
        return [whole({"choices": [], "usage": usage(5, 3)})]
    pieces = [chunk(delta(content=text) | {"usage": usage(5, 3)}) for text in ("one", "two")]
    return [HEAD, *pieces, chunk({"choices": [], "usage": usage(5, 3, cached=2)}), END]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """(options) -> the bodies that were sent, the result, and all that was asked."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*options, script=script, status=0):
        file = tmp_path / "result.json"
        with toy_server(script) as server:
            given = ["--base-url", server.url, "--num-requests", "3", "--json", str(file), *options]
            assert main(["bench", "serve", *given]) == status
        result = json.loads(file.read_text())
        bodies = sorted((body for _, _, body in server.asked if body is not None), key=lambda body: body["seed"])
        return bodies, result, server.asked

    return run


def test_the_json_has_every_quantity_and_setting(bench):
    _, result, _ = bench("--concurrency", "2", "--request-rate", "1000", "--seed", "4")
    assert result.keys() == {"benchmark", "settings", "environment", "results"}
    results, settings = result["results"], result["settings"]
    assert results["num_requests"] == 3 and (results["prompt_tokens"], results["output_tokens"]) == (15, 9)
    assert results["cached_tokens"] == 6 and results["num_failed"] == 0 and results["errors"] == {}
    assert results.keys() >= SUMMARIES and results["latency"].keys() == {"mean", "p50", "p90", "p95", "p99"}
    assert (settings["model"], settings["workload"], settings["num_requests"]) == ("toy", "random", 3)
    assert (settings["concurrency"], settings["request_rate"], settings["seed"]) == (2, 1000.0, 4)


def test_requests_have_only_fields_of_openai_by_default(bench):
    bodies, _, asked = bench("--seed", "7")
    assert [path for path, _, _ in asked] == ["/v1/models"] + ["/v1/chat/completions"] * 3
    assert all(body.keys() == OF_OPENAI for body in bodies)
    assert [body["seed"] for body in bodies] == [7, 8, 9]
    assert all(body["model"] == "toy" and body["stream_options"] == {"include_usage": True} for body in bodies)


def test_what_is_asked_of_other_servers_only_is_sent_on_demand(bench):
    more = '{"top_p": 0.5, "seed": 3}'
    bodies, result, _ = bench("--usage-in-pieces", "--ignore-eos", "--extra-body", more)
    assert all(body["ignore_eos"] is True and body["top_p"] == 0.5 and body["seed"] == 3 for body in bodies)
    assert all(body["stream_options"]["continuous_usage_stats"] is True for body in bodies)
    assert result["settings"]["extra_body"] == json.loads(more)


def test_whole_answers_are_asked_for_without_a_stream(bench):
    bodies, result, _ = bench("--no-stream")
    assert not any("stream" in body or "stream_options" in body for body in bodies)
    assert result["results"]["output_tokens"] == 9 and result["results"]["time_to_first_token"] is None


def test_a_model_that_is_named_is_not_asked_for(bench):
    bodies, _, asked = bench("--model", "mine")
    assert len(asked) == 3 and all(body["model"] == "mine" for body in bodies)


def test_the_key_is_sent_with_every_request(bench, monkeypatch):
    _, _, asked = bench("--api-key", "secret")
    assert all(headers["authorization"] == "Bearer secret" for _, headers, _ in asked)
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    _, result, asked = bench()
    assert all(headers["authorization"] == "Bearer other" for _, headers, _ in asked)
    assert "other" not in json.dumps(result)


def test_prompts_of_token_ids_are_those_of_bench_throughput(bench):
    from jaxinfer.bench.workload import LengthRange, random_workload

    options = [
        "--endpoint",
        "completions",
        "--vocab-size",
        "50",
        "--input-len",
        "4:9",
        "--output-len",
        "2",
        "--seed",
        "5",
    ]
    bodies, _, asked = bench(*options)
    items = random_workload(
        num_requests=3, input_len=LengthRange(4, 9), output_len=LengthRange(2, 2), vocab_size=50, seed=5
    )
    assert [{"prompt_token_ids": body["prompt"]} for body in bodies] == [item.prompt for item in items]
    assert [body["max_tokens"] for body in bodies] == [2, 2, 2]
    assert asked[-1][0] == "/v1/completions"


def test_a_dataset_is_sent_as_it_is(bench, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "Say a", "max_tokens": 3}\n{"prompt": "Say b", "max_tokens": 4}\n')
    bodies, result, _ = bench("--dataset", str(file))
    assert [(body["messages"][0]["content"], body["max_tokens"]) for body in bodies] == [("Say a", 3), ("Say b", 4)]
    assert result["settings"]["num_requests"] == 2


def test_failed_requests_are_shown_with_their_reason(bench, capsys):
    answers = iter([[whole({"error": {"message": "too [busy]"}}, 503)]])
    _, result, _ = bench(script=lambda body: next(answers, None) or script(body))
    assert result["results"]["errors"] == {"status 503: too [busy]": 1} and result["results"]["num_requests"] == 2
    assert "status 503: too [busy]" in capsys.readouterr().out


def test_a_run_without_a_success_is_an_error(bench, capsys):
    bench(script=lambda body: [whole({"error": {"message": "no"}}, 400)], status=1)
    assert "no request has succeeded: status 400: no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "localhost:1"], "an address is written http://HOST:PORT"),
        (["--request-rate", "0"], "request_rate must be above 0"),
        (["--vocab-size", "9"], "--endpoint completions"),
        (["--vocab-size", "9", "--workload", "shared-prefix"], "--vocab-size goes with --workload random"),
        (["--num-requests", "0"], "num_requests must be at least 1"),
        (["--model", "m", "--base-url", "http://127.0.0.1:9", "--concurrency", "0"], "concurrency must be at least 1"),
        (["--base-url", "http://127.0.0.1:9"], "the server does not name its models"),
    ],
)
def test_a_bad_option_is_reported_on_one_line(options, message, capsys):
    assert main(["bench", "serve", *options]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error and error.startswith("jaxinfer: error: ")
