"""`jaxinfer plan`: its table, its JSON, its exit status and its errors, on a machine without the CUDA wheels."""

import json
import shutil
from pathlib import Path

import pytest

from jaxinfer.cli import plan_command as command
from jaxinfer.cli.main import main
from jaxinfer.cli.plan import EXIT_DOES_NOT_FIT

FIGURES = (
    "weights_bytes", "kv_bytes", "kv_bytes_per_token", "kv_alias_bytes", "kv_copies", "temp_bytes", "fits",
    "largest_kv_tokens", "decode_kernels_per_layer", "host_waits", "decode_floor_ms", "prefill_floor_ms",
)  # fmt: skip
MORE = (
    "limit_bytes", "reserve_bytes", "largest_max_num_seqs", "largest_max_model_len", "decode_floor_one_sequence_ms",
    "kv_outside_windows_bytes",
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent.parent
COMPILED = ("kv_alias_bytes", "kv_copies", "temp_bytes", "decode_kernels_per_layer", "host_waits")
ASKED = ("--device", "h200", "--max-num-seqs", "64", "--max-model-len", "4096")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(command, "cuda_plugin", lambda: None)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def qwen(configs):
    return str(configs / "qwen3-8b")


def error_of(capsys) -> str:
    text = capsys.readouterr().err
    assert text.startswith("jaxinfer: error: ") and text.count("\n") == 1
    return text


def test_json_has_exactly_the_promised_figures_and_null_for_what_was_not_compiled(qwen, capsys):
    assert main(["plan", qwen, *ASKED, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert tuple(plan) == (*FIGURES, *MORE, "settings", "device", "programs")
    assert [plan[name] for name in COMPILED] == [None] * len(COMPILED) and plan["programs"] is None
    assert (plan["weights_bytes"], plan["kv_bytes"]) == (16_381_470_720, 64 * 4096 * 147_456)
    assert plan["fits"] is True


def test_the_table_ends_with_the_verdict_and_says_how_to_compile(qwen, capsys):
    assert main(["plan", qwen, *ASKED]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "16.38 GB" in shown and "12.51 ms" in shown and "measured" in shown
    assert 'pip install "jaxinfer[cuda13]"' in shown
    assert "fits: 64 sequences of 4096 tokens" in shown


@pytest.mark.parametrize(
    ("utilization", "variable", "words"),
    [
        (0.8, "", "120.00 GB │ 0.8 of the card's 150.00 GB (gpu_memory_utilization)"),
        (0.8, "0.9", "120.00 GB │ 0.8 of the card's 150.00 GB (gpu_memory_utilization)"),
        (0.8, "0.6", "90.00 GB │ 0.6 of the card's 150.00 GB: JAX's share (XLA_CLIENT_MEM_FRACTION), less than"),
        (1, "", "145.50 GB │ 0.97 of the card's 150.00 GB: the most that JAX is given, less than"),
        (1, "1", "150.00 GB │ 1 of the card's 150.00 GB (gpu_memory_utilization)"),
    ],
)
def test_the_table_says_what_the_limit_is_a_share_of(qwen, monkeypatch, capsys, utilization, variable, words):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", variable)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", qwen, *ASKED, "--gpu-memory-utilization", str(utilization)]) == 0
    assert f"limit │ {words}" in " ".join(capsys.readouterr().out.split())


def test_a_share_in_the_environment_that_jax_would_refuse_is_an_error_of_one_line(qwen, monkeypatch, capsys):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "most")
    assert main(["plan", qwen, *ASKED]) == 1
    assert "XLA_CLIENT_MEM_FRACTION must be a number in (0, 1], got 'most'" in error_of(capsys)


def test_what_does_not_fit_has_an_exit_status_of_its_own(qwen, capsys):
    assert main(["plan", qwen, "--device", "h100", "--max-num-seqs", "128", "--max-model-len", "8192"]) == 3
    assert EXIT_DOES_NOT_FIT == 3
    assert "does not fit" in capsys.readouterr().out


def test_one_more_sequence_than_the_largest_setting_does_not_fit(qwen, capsys):
    main(["plan", qwen, *ASKED, "--json"])
    most = json.loads(capsys.readouterr().out)["largest_max_num_seqs"]
    rest = ["--max-model-len", "4096", "--json"]
    assert main(["plan", qwen, "--max-num-seqs", str(most), *rest]) == 0
    assert main(["plan", qwen, "--max-num-seqs", str(most + 1), *rest]) == 3


def test_defaults_are_the_engine_s_and_the_model_s(qwen, capsys):
    main(["plan", qwen, "--json"])
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["max_num_seqs"] == 256 and settings["max_num_batched_tokens"] == 2048
    assert settings["max_model_len"] == 40960 and settings["page_size"] == 16
    assert settings["dtype"] == "bfloat16" and settings["gpu_memory_utilization"] == 0.9


def test_options_reach_the_plan(qwen, capsys):
    options = {
        "--max-num-seqs": 8, "--max-model-len": 100, "--max-num-batched-tokens": 64, "--page-size": 32,
        "--gpu-memory-utilization": 0.5, "--tensor-parallel-size": 2,
    }  # fmt: skip
    given = [str(word) for pair in options.items() for word in pair]
    main(["plan", qwen, "--device", "B200", "--dtype", "float32", *given, "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert [plan["settings"][name.strip("-").replace("-", "_")] for name in options] == list(options.values())
    assert plan["device"]["name"] == "b200" and plan["settings"]["dtype"] == "float32"
    assert plan["kv_bytes_per_token"] == 147_456 and plan["kv_bytes"] == 8 * 128 * 147_456


def test_programs_are_compiled_for_all_the_gpus(qwen, monkeypatch, capsys):
    def refuse(gpu, num_devices):
        raise ValueError(f"compiles for {num_devices} {gpu.name}")

    monkeypatch.setattr(command, "cuda_plugin", lambda: Path("plugin"))
    monkeypatch.setattr(command, "compile_target", refuse)
    assert main(["plan", qwen, *ASKED, "--tensor-parallel-size", "2"]) == 1
    assert "compiles for 2 h200" in error_of(capsys)


def test_compiled_figures_complete_table_and_json(stand_in, monkeypatch, capsys):
    monkeypatch.setattr(command, "cuda_plugin", lambda: Path("plugin"))
    monkeypatch.setattr(command, "compile_target", stand_in)
    limits = ["--device", "b200", "--max-num-seqs", "4", "--max-model-len", "64", "--max-num-batched-tokens", "32"]
    arguments = ["plan", str(ROOT / "checkpoints" / "tiny"), *limits, "--dtype", "float32"]
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    plan = json.loads(printed.out)
    assert plan["kv_alias_bytes"] == plan["kv_bytes"] and plan["decode_kernels_per_layer"] > 0
    assert plan["temp_bytes"] == max(program["temp_bytes"] for program in plan["programs"]) > 0
    assert [program["name"] for program in plan["programs"]] == [
        "prefill",
        "entry",
        "prompt_logprobs",
        "decode_loop",
        "branch_loop",
        "commit_tail",
    ]
    assert printed.err.count("compiling for NVIDIA B200: ") == 7
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "kernels per layer" in shown and "copies of KV" in shown and "Not compiled" not in shown


def test_a_file_and_a_directory_without_weights_are_both_a_model(qwen, tmp_path, capsys):
    shutil.copy(f"{qwen}/config.json", tmp_path / "some-model.json")
    figures = []
    for source in (qwen, f"{qwen}/config.json", str(tmp_path / "some-model.json")):
        assert main(["plan", source, *ASKED, "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out)["weights_bytes"])
    assert set(figures) == {16_381_470_720}


def test_the_embedded_checkpoint_can_be_planned(capsys):
    assert main(["plan", str(ROOT / "checkpoints" / "tiny"), "--max-num-seqs", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_of_a_hub_id_the_configuration_alone_is_loaded(qwen, monkeypatch, capsys):
    import huggingface_hub

    asked = {}

    def snapshot(name, **options):
        asked.update(options, name=name)
        return qwen

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert main(["plan", "Qwen/Qwen3-8B", *ASKED]) == 0
    assert (asked["name"], asked["allow_patterns"]) == ("Qwen/Qwen3-8B", ["config.json"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "h2000"], "device='h2000' is not known; known: h200, h100, b200"),
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer of at least 1, got 0"),
        (["--page-size", "12"], "page_size must be a power of two up to 256, got 12"),
        (["--max-num-seqs", "512", "--max-num-batched-tokens", "256"], "must be at least max_num_seqs (512)"),
        (["--max-model-len", "40961"], "max_model_len=40961 exceeds the model's max_position_embeddings (40960)"),
        (["--dtype", "int4"], "dtype='int4' is not supported"),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization must be in (0, 1], got 90.0"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size=3"),
    ],
)
def test_a_bad_option_is_an_error_of_one_line_that_says_what_is_allowed(qwen, capsys, options, message):
    assert main(["plan", qwen, *options]) == 1
    assert message in error_of(capsys)


def test_a_model_that_is_not_there_or_has_no_configuration_is_an_error_of_one_line(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "missing"), *ASKED]) == 1
    assert "missing" in error_of(capsys)
    assert main(["plan", str(tmp_path), *ASKED]) == 1
    assert "has no config.json" in error_of(capsys)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert main(["plan", str(tmp_path), *ASKED]) == 1
    assert "GPT2LMHeadModel" in error_of(capsys)


def test_the_help_shows_an_example_and_the_exit_status(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert "\n  jaxinfer plan " in shown and "3 if it does not" in shown
