"""Options of `jaxinfer generate` that hold an output to a grammar reach the request's sampling parameters."""

from types import SimpleNamespace

import pytest

import jaxinfer
from jaxinfer.cli.main import main

SCHEMA = '{"type": "object", "properties": {"b": {}, "a": {}}}'


class OneAnswer:
    """A fake engine that remembers the parameters it was called with."""

    params: list[jaxinfer.SamplingParams] = []

    def __init__(self, *given, **options):
        OneAnswer.params.clear()

    def default_sampling_params(self, **given):
        return jaxinfer.SamplingParams(**given)

    def get_tokenizer(self):
        return SimpleNamespace(hf=SimpleNamespace(chat_template="a template"))

    def stream(self, prompt, params):
        OneAnswer.params.append(params)
        yield SimpleNamespace(outputs=[SimpleNamespace(text="answer")], error=None)


@pytest.fixture
def asked(monkeypatch):
    """(arguments) -> the structured outputs that one prompt is generated with."""
    monkeypatch.setattr(jaxinfer, "LLM", OneAnswer)

    def ask(*argv):
        assert main(["generate", "a prompt", *map(str, argv)]) == 0
        return OneAnswer.params[0].structured_outputs

    return ask


def test_without_an_option_nothing_is_asked_for(asked):
    assert asked() is None


def test_each_option_is_its_kind(asked, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(SCHEMA, encoding="utf-8")
    grammar.write_text('start: "é"', encoding="utf-8")
    params = jaxinfer.StructuredOutputsParams
    assert asked("--json-schema", schema) == params(json=SCHEMA)
    assert asked("--grammar", grammar) == params(grammar='start: "é"')
    assert asked("--regex", "[a-z]+") == params(regex="[a-z]+")
    assert asked("--choice", "yes", "no", "--seed", "1") == params(choice=["yes", "no"])


def test_two_options_are_wrong_usage(asked, capsys):
    with pytest.raises(SystemExit) as exit_:
        asked("--regex", "a", "--choice", "b")
    assert exit_.value.code == 2 and "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--json-schema", b"[1]", "structured_outputs.json must be the text of an object or a bool, got '[1]'"),
        ("--json-schema", b"{", "structured_outputs.json must be JSON: "),
        ("--grammar", b"", "structured_outputs.grammar must be a non-empty string, got ''"),
        ("--grammar", b"\xff", "given.txt is not text in UTF-8: "),
        ("--json-schema", None, "No such file"),
    ],
)
def test_a_file_that_is_no_grammar_is_an_error_of_one_line(option, content, message, asked, tmp_path, capsys):
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["generate", "a prompt", option, str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxinfer: error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", ""], "structured_outputs.regex must be a non-empty string"),
        (["--choice", "a", "a"], "structured_outputs.choice must hold each text once, got 'a' twice"),
    ],
)
def test_a_bad_value_is_reported_before_a_model_is_loaded(options, message, asked, monkeypatch, capsys):
    monkeypatch.setattr(OneAnswer, "__init__", lambda self, *given, **options: pytest.fail("a model is loaded"))
    assert main(["generate", "a prompt", *options]) == 1
    assert message in capsys.readouterr().err
