"""The `jaxinfer` command: its options reach the engine, its errors are one line, its help shows examples."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxinfer
from jaxinfer.checkpoint.export import export_hf
from jaxinfer.cli.main import build_parser, main
from jaxinfer.models.config import ModelConfig
from tests.builders import random_model

ROOT = Path(__file__).resolve().parents[2]


class EchoLLM:
    """A fake engine that answers with the last words it was given and remembers what it was asked."""

    latest: "EchoLLM"
    chat_template = "a template"

    def __init__(self, model=None, **options):
        self.model, self.options, self.asked, self.params = model, options, [], None
        EchoLLM.latest = self

    def default_sampling_params(self, **given):
        return jaxinfer.SamplingParams(**{"temperature": 0.25, "top_p": 0.5, **given})

    def get_tokenizer(self):
        return SimpleNamespace(hf=SimpleNamespace(chat_template=self.chat_template))

    def _answer(self, prompt, params):
        self.asked.append(prompt)
        self.params = params
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "refuse":
            raise ValueError("prompt is too long")
        self.error = "the step failed" if text == "fail" else None
        return f"echo {text}"

    def stream(self, prompt, params):
        for word in self._answer(prompt, params).split(" "):
            yield self._output(f"{word} ")

    def generate(self, prompts, params):
        return [self._output(self._answer(prompt, params)) for prompt in prompts]

    chat = generate

    def _output(self, text):
        return SimpleNamespace(
            outputs=[SimpleNamespace(text=text)],
            num_cached_tokens=16,
            prompt_token_ids=list(range(20)),
            error=self.error,
        )

    def draw_prefix_cache(self):
        return "a drawing of the cache"


@pytest.fixture
def echo(monkeypatch):
    monkeypatch.setattr(jaxinfer, "LLM", EchoLLM)
    return EchoLLM


def type_lines(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("verb", ["generate", "chat", "convert"])
def test_the_help_of_each_verb_shows_an_example(verb, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([verb, "--help"])
    assert exit_.value.code == 0
    assert f"\n  jaxinfer {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["unknown"], ["generate"], ["convert", "only-a-source"]])
def test_wrong_usage_exits_with_two(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "usage: jaxinfer" in capsys.readouterr().err


def test_options_may_stand_before_and_after_the_prompts():
    args = build_parser().parse_args(["generate", "--top-k", "5", "one", "two", "--stop", "x", "--stop", "y"])
    assert args.prompts == ["one", "two"]
    assert args.top_k == 5
    assert args.stop == ["x", "y"]


def test_a_model_that_is_not_there_is_an_error_of_one_line_with_exit_code_one(tmp_path, capsys):
    missing = tmp_path / "no-such-model"
    assert main(["generate", "hello", "--model", str(missing)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxinfer: error: ") and error.count("\n") == 1
    assert str(missing) in error


def test_converting_a_directory_that_is_not_there_names_it_and_leaves_nothing_behind(tmp_path, capsys):
    missing = tmp_path / "no-such-source"
    assert main(["convert", str(missing), str(tmp_path / "converted")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxinfer: error: ") and error.count("\n") == 1
    assert str(missing) in error
    assert list(tmp_path.iterdir()) == []


def test_a_converted_checkpoint_is_replaced_only_on_request(tmp_path, capsys):
    source, converted = str(tmp_path / "source"), str(tmp_path / "converted")
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=4, max_position_embeddings=2048, qk_norm=True,
    )  # fmt: skip
    export_hf(random_model(config), config, source)
    assert main(["convert", source, converted]) == 0
    assert main(["convert", source, converted]) == 1
    assert "exists" in capsys.readouterr().err
    assert main(["convert", source, converted, "--overwrite"]) == 0


def test_verbose_shows_the_traceback_before_the_one_line(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "no-such-source"), str(tmp_path / "converted"), "--verbose"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("jaxinfer: error: ")


def test_one_prompt_is_streamed_through_the_chat_template(echo, capsys):
    assert main(["generate", "good day"]) == 0
    assert echo.latest.asked == [[user("good day")]]
    assert capsys.readouterr().out == "echo good day \n"


def test_raw_gives_the_prompt_to_the_model_as_it_stands(echo):
    assert main(["generate", "--raw", "once upon"]) == 0
    assert echo.latest.asked == ["once upon"]


def test_a_checkpoint_without_a_chat_template_asks_for_raw(echo, monkeypatch, capsys):
    monkeypatch.setattr(echo, "chat_template", None)
    assert main(["generate", "once upon"]) == 1
    assert "add --raw" in capsys.readouterr().err
    assert main(["generate", "--raw", "once upon"]) == 0


def test_several_prompts_are_printed_in_order_under_their_own_headings(echo, capsys):
    assert main(["generate", "one", "two"]) == 0
    assert capsys.readouterr().out == "=== one\necho one\n\n=== two\necho two\n\n"


@pytest.mark.parametrize("prompts", [["hello"], ["hello", "there"]])
def test_what_was_cached_is_shown_on_request_and_beside_the_text(prompts, echo, capsys):
    assert main(["generate", *prompts]) == 0
    assert capsys.readouterr().err == ""
    assert main(["generate", *prompts, "--show-cache"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("16 of 20 prompt tokens were cached") == len(prompts)
    assert "a drawing of the cache" in shown.err and "cached" not in shown.out


def test_a_chat_shows_after_each_turn_what_was_cached(echo, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    assert main(["chat", "--show-cache"]) == 0
    assert capsys.readouterr().err.count("16 of 20 prompt tokens were cached") == 2


def test_without_a_model_the_engine_chooses_the_embedded_checkpoint(echo):
    main(["generate", "hello"])
    assert echo.latest.model is None


def test_engine_options_reach_the_engine(echo):
    main(["generate", "hello", "--model", "somewhere", "--dtype", "float32", "--max-model-len", "64"])
    assert echo.latest.model == "somewhere"
    assert echo.latest.options == {"dtype": "float32", "max_model_len": 64, "speculative_config": None}


def test_options_about_unknown_fields_reach_the_engine(echo):
    assert main(["generate", "hello", "--ignore-config-field", "a", "--ignore-config-field", "b"]) == 0
    assert echo.latest.options["ignore_config_fields"] == ("a", "b") and "strict_config" not in echo.latest.options
    assert main(["generate", "hello", "--strict-config"]) == 0
    assert echo.latest.options["strict_config"] is True and "ignore_config_fields" not in echo.latest.options


def test_converting_reads_past_fields_on_request_only(tmp_path, capsys):
    source = tmp_path / "source"
    shape = ModelConfig("LlamaForCausalLM", 64, 16, 24, 1, 2, 2, 8, 2048)
    export_hf(random_model(shape), shape, source)
    values = json.loads((source / "config.json").read_text()) | {"logit_scale": 2.0, "is_llama_config": True}
    (source / "config.json").write_text(json.dumps(values))
    argv = ["convert", str(source), str(tmp_path / "converted")]
    assert main(argv) == 1
    assert "--ignore-config-field logit_scale" in capsys.readouterr().err
    assert main([*argv, "--ignore-config-field", "logit_scale", "--strict-config"]) == 1
    assert "is_llama_config=True" in capsys.readouterr().err
    assert main([*argv, "--ignore-config-field", "logit_scale"]) == 0


def test_speculation_reaches_the_engine(echo, monkeypatch):
    assert main(["generate", "hello", "--speculative", "draft_model", "--draft-model", "small"]) == 0
    assert echo.latest.options["speculative_config"] == {"method": "draft_model", "model": "small"}
    type_lines(monkeypatch, "hello")
    assert main(["chat", "--speculative", "ngram"]) == 0
    assert echo.latest.options["speculative_config"] == {"method": "ngram", "model": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft-model", "small"], "--draft-model goes with --speculative draft_model"),
        (["--speculative", "ngram", "--draft-model", "small"], "--draft-model goes with --speculative draft_model"),
        (["--show-drafts"], "--show-drafts shows the drafts of one prompt"),
        (["another", "--speculative", "ngram", "--show-drafts"], "--show-drafts shows the drafts of one prompt"),
    ],
)
def test_options_of_speculation_that_do_not_go_together_are_refused(echo, capsys, options, message):
    assert main(["generate", "hello", *options]) == 1
    assert message in capsys.readouterr().err


def test_sampling_options_win_over_the_defaults_of_the_checkpoint(echo):
    main(["generate", "hello", "--temperature", "0.75", "--max-tokens", "9", "--seed", "3", "--stop", "."])
    params = echo.latest.params
    assert (params.temperature, params.max_tokens, params.seed, params.stop_strings) == (0.75, 9, 3, (".",))
    assert params.top_p == 0.5


def test_a_bad_sampling_value_is_reported_before_a_model_is_looked_for(capsys):
    assert main(["generate", "hello", "--model", "no-such-model", "--top-p", "1.5"]) == 1
    assert capsys.readouterr().err.startswith("jaxinfer: error: top_p must be")


def test_an_interrupted_command_exits_as_shells_expect_and_shows_no_traceback(echo, capsys):
    assert main(["generate", "interrupt"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_a_pipe_early_is_no_error():
    code = (
        "import sys; from jaxinfer.cli import main as cli; cli.run_generate = lambda _: print('text'); "
        "sys.exit(cli.main())"
    )
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", code, "generate", "hello"]
    result = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


def test_chat_keeps_the_conversation(echo, monkeypatch):
    type_lines(monkeypatch, "hello", "and now?")
    assert main(["chat", "--system", "Be brief."]) == 0
    opening = {"role": "system", "content": "Be brief."}
    assert echo.latest.asked[1] == [opening, user("hello"), assistant("echo hello "), user("and now?")]


def test_clear_forgets_the_conversation_but_not_the_system_message(echo, monkeypatch):
    type_lines(monkeypatch, "hello", "/clear", "again")
    main(["chat", "--system", "Be brief."])
    assert echo.latest.asked[1] == [{"role": "system", "content": "Be brief."}, user("again")]


def test_exit_ends_the_chat_and_empty_lines_are_no_turns(echo, monkeypatch):
    type_lines(monkeypatch, "", "  ", "hello", "/exit", "never asked")
    assert main(["chat"]) == 0
    assert echo.latest.asked == [[user("hello")]]


@pytest.mark.parametrize("prompts", [["fail"], ["hello", "fail"]])
def test_an_answer_that_has_ended_with_an_error_is_an_error(echo, capsys, prompts):
    assert main(["generate", *prompts]) == 1
    assert capsys.readouterr().err == "jaxinfer: error: the step failed\n"


def test_a_refused_turn_ends_a_chat_from_a_pipe_with_exit_code_one(echo, monkeypatch, capsys):
    type_lines(monkeypatch, "refuse", "never asked")
    assert main(["chat"]) == 1
    assert "jaxinfer: error: prompt is too long\n" in capsys.readouterr().err
    assert len(echo.latest.asked) == 1


def test_a_refused_turn_leaves_a_person_s_conversation_as_it_was(echo, monkeypatch, capsys):
    turns = iter(["hello", "refuse", "go on", "/exit"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda prompt: next(turns))
    assert main(["chat"]) == 0
    assert "prompt is too long" in capsys.readouterr().err
    assert echo.latest.asked[-1] == [user("hello"), assistant("echo hello "), user("go on")]
