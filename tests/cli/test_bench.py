"""`jaxinfer bench` from the command line to its JSON, on a tiny random checkpoint."""

import json

import pytest

from jaxinfer.cli.main import main
from tests.tiny_checkpoints import MAX_LEN, write_checkpoint

LIMITS = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--kv-cache-tokens", "256"]
LATENCIES = {"mean", "p50", "p90", "p95", "p99"}
COUNTS = {"num_requests", "prompt_tokens", "output_tokens", "steps", "launches", "preemptions", "compiles"}
RATES = {"output_tokens_per_second", "total_tokens_per_second", "requests_per_second"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("random"), random=True)


@pytest.fixture(scope="module")
def throughput(checkpoint, tmp_path_factory):
    """The JSON of a run with the default lengths, which are too long for the model, and Poisson arrivals."""
    file = tmp_path_factory.mktemp("bench") / "result.json"
    options = ["--model", str(checkpoint), "--num-requests", "5", "--request-rate", "1000", "--json", str(file)]
    assert main(["bench", "throughput", *options, *LIMITS]) == 0
    return json.loads(file.read_text())


def test_the_json_of_throughput_has_every_quantity(throughput):
    assert throughput.keys() == {"benchmark", "settings", "environment", "results"}
    results = throughput["results"]
    assert results.keys() == COUNTS | RATES | {
        "seconds", "time_to_first_token", "inter_token_latency", "mean_batch", "host_ms_per_step"
    }  # fmt: skip
    assert results["time_to_first_token"].keys() == results["inter_token_latency"].keys() == LATENCIES


def test_the_json_of_throughput_has_versions_device_and_settings(throughput):
    assert {"jaxinfer", "python", "jax", "jaxlib"} <= throughput["environment"]["versions"].keys()
    assert throughput["environment"]["device"].endswith("-core CPU")
    settings = throughput["settings"]
    assert (settings["num_requests"], settings["request_rate"], settings["ignore_eos"]) == (5, 1000.0, True)
    assert (settings["max_num_seqs"], settings["kv_cache_tokens"]) == (1, 256)


def test_lengths_that_the_model_cannot_hold_are_scaled_to_it(throughput):
    settings = throughput["settings"]
    assert settings["scale"] == pytest.approx(MAX_LEN / 2048)
    assert (settings["input_len"], settings["output_len"]) == ("6:64", "6:64")


def test_no_program_is_compiled_while_the_clock_runs(throughput):
    assert throughput["results"]["compiles"] == 0


def test_every_request_of_a_random_workload_generates_all_its_tokens(throughput):
    results = throughput["results"]
    assert results["num_requests"] == 5
    assert 5 * 6 <= results["output_tokens"] <= 5 * 64


def test_a_dataset_is_run_as_it_stands(checkpoint, tmp_path, capsys):
    dataset, file = tmp_path / "requests.jsonl", tmp_path / "result.json"
    lines = [{"prompt": "Say a", "max_tokens": 3}, {"prompt_token_ids": [1, 2], "max_tokens": 4}]
    dataset.write_text("\n".join(map(json.dumps, lines)))
    options = ["--model", str(checkpoint), "--dataset", str(dataset), "--ignore-eos", "--json", str(file)]
    assert main(["bench", "throughput", *options, *LIMITS]) == 0
    assert json.loads(file.read_text())["results"]["output_tokens"] == 7
    assert "output tokens per second" in capsys.readouterr().out


def test_latency_repeats_a_batch_and_summarizes_the_iterations(checkpoint, tmp_path, capsys):
    file = tmp_path / "result.json"
    sizes = ["--batch-size", "2", "--input-len", "4", "--output-len", "5", "--num-iters", "3"]
    assert main(["bench", "latency", "--model", str(checkpoint), *sizes, *LIMITS, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert [run["output_tokens"] for run in results["iterations"]] == [10, 10, 10]
    assert results["seconds"].keys() == results["seconds_per_output_token"].keys() == LATENCIES
    assert results["seconds"]["mean"] == pytest.approx(5 * results["seconds_per_output_token"]["mean"])
    assert "per output token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["throughput", "--dataset", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["throughput", "--request-rate", "0"], "request_rate must be above 0, got 0.0"),
        (["throughput", "--temperature", "-1"], "temperature"),
        (["latency", "--num-iters", "0"], "--num-iters must be at least 1, got 0"),
    ],
)
def test_a_bad_option_is_reported_on_one_line_before_a_model_is_loaded(options, message, capsys):
    assert main(["bench", *options, "--model", "no-such-model"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_scale_that_does_not_fit_the_model_is_refused(checkpoint, capsys):
    assert main(["bench", "throughput", "--model", str(checkpoint), *LIMITS, "--scale", "0.5"]) == 1
    assert f"exceed max_model_len={MAX_LEN}" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", ["throughput", "latency"])
def test_the_help_of_each_benchmark_shows_an_example(benchmark, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", benchmark, "--help"])
    assert exit_.value.code == 0
    assert f"\n  jaxinfer bench {benchmark}" in capsys.readouterr().out
