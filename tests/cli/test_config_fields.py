"""Unknown fields of a model's and a drafter's `config.json`, as users of `LLM` and of the command line meet them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxinfer import LLM
from jaxinfer.checkpoint import load_head
from jaxinfer.cli import plan_command as command
from jaxinfer.cli.main import main
from jaxinfer.models.config import UnsupportedConfigError
from tests.checkpoint.builders import tiny_config, write_checkpoint
from tests.checkpoint.heads import TARGET, head_config, write_head

LIMITS = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_tokens": 64}
PUBLISHED = Path(__file__).resolve().parents[1] / "fixtures" / "configs" / "published"


def edited(directory: Path, **fields: object) -> Path:
    """The directory, with fields of its config.json set."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return directory


@pytest.fixture
def target(tmp_path) -> Path:
    write_checkpoint(tmp_path / "target", TARGET)
    return tmp_path / "target"


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "ignores fields" in record.getMessage()]


def test_an_engine_names_the_ignored_fields_of_each_configuration_once(target, tmp_path, caplog):
    draft = tmp_path / "draft"
    write_checkpoint(draft, tiny_config("Qwen3ForCausalLM", num_layers=1))
    edited(target, is_llama_config=True)
    edited(draft, pad_token="<pad>")
    LLM(target, skip_tokenizer_init=True, speculative_config={"method": "draft_model", "model": draft}, **LIMITS)
    of_target, of_draft = warnings_of(caplog)
    assert "is_llama_config=True" in of_target and "pad_token" not in of_target
    assert "pad_token='<pad>'" in of_draft


def test_what_an_engine_is_to_ignore_holds_for_its_drafter_too(target, tmp_path, caplog):
    write_head(tmp_path / "head", head_config(norm_before_fc=True))
    edited(target, rope_interleaved=True)
    speculative = {"method": "eagle3", "model": tmp_path / "head", "tree_top_k": 1}
    options = {"skip_tokenizer_init": True, "speculative_config": speculative, **LIMITS}
    with pytest.raises(UnsupportedConfigError, match="rope_interleaved=True"):
        LLM(target, **options)
    with pytest.raises(UnsupportedConfigError, match="norm_before_fc=True"):
        LLM(target, ignore_config_fields=["rope_interleaved"], **options)
    caplog.clear()
    LLM(target, ignore_config_fields=["rope_interleaved", "norm_before_fc"], strict_config=True, **options)
    assert len(warnings_of(caplog)) == 2


def test_a_strict_engine_refuses_what_others_ignore(target):
    edited(target, is_llama_config=True)
    with pytest.raises(UnsupportedConfigError, match=r"is_llama_config=True \(strict_config refuses unknown fields\)"):
        LLM(target, skip_tokenizer_init=True, strict_config=True, **LIMITS)


def test_an_engine_cannot_be_told_to_ignore_what_it_reads(target):
    with pytest.raises(UnsupportedConfigError, match="ignore_config_fields names hidden_size, which Qwen3ForCausalLM"):
        LLM(target, skip_tokenizer_init=True, ignore_config_fields=["hidden_size"], **LIMITS)


def test_a_head_is_loaded_past_fields_on_request(tmp_path):
    write_head(tmp_path / "head", head_config(norm_before_fc=True))
    with pytest.raises(UnsupportedConfigError, match="norm_before_fc=True .transformers has no model type 'eagle3'"):
        load_head(tmp_path / "head", TARGET)
    assert load_head(tmp_path / "head", TARGET, ignore_config_fields=["norm_before_fc"]).config.capture == (2, 4, 5)


@pytest.mark.parametrize("name", ["smollm2-135m", "sdar-8b-chat"])
def test_published_models_are_planned(name, monkeypatch, capsys):
    monkeypatch.setattr(command, "cuda_plugin", lambda: None)
    assert main(["plan", str(PUBLISHED / name), "--max-num-seqs", "4", "--max-model-len", "512", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_a_plan_reads_past_fields_of_model_and_drafter_on_request(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "cuda_plugin", lambda: None)
    write_head(tmp_path / "head", head_config(norm_before_fc=True))
    edited(target, rope_interleaved=True)
    asked = ["plan", str(target), "--max-num-seqs", "1", "--speculative", "eagle3", "--draft-model"]
    asked += [str(tmp_path / "head"), "--json"]
    assert main(asked) == 1
    assert "--ignore-config-field rope_interleaved" in capsys.readouterr().err
    asked += ["--ignore-config-field", "rope_interleaved"]
    assert main(asked) == 1
    assert "--ignore-config-field norm_before_fc" in capsys.readouterr().err
    assert main([*asked, "--ignore-config-field", "norm_before_fc"]) == 0


def test_a_benchmark_takes_the_options_too(target, capsys):
    edited(target, is_llama_config=True)
    asked = ["bench", "latency", "--model", str(target), "--max-model-len", "32", "--kv-cache-tokens", "64"]
    assert main([*asked, "--max-num-seqs", "2", "--strict-config"]) == 1
    assert "is_llama_config=True (strict_config refuses unknown fields)" in capsys.readouterr().err
