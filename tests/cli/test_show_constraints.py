"""--show-constraints: marks around what a grammar has changed or forced, and the plain text between them."""

import io
import re

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cli.main import main
from jaxinfer.cli.show_constraints import print_constraints

QUESTION = [{"role": "user", "content": "Who keeps the lighthouse?"}]
FORM = {"grammar": 'start: "The lamp of the harbour is number " /[0-9]/ " of nine."'}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def llm():
    return LLM(max_num_seqs=2, max_num_batched_tokens=128, max_model_len=256)


def shown(llm, out, **params):
    asked = SamplingParams(temperature=0.0, max_tokens=60, return_token_sources=True, **params)
    return print_constraints(llm.stream([QUESTION], asked), llm.get_tokenizer(), out)


def test_forced_text_is_in_brackets_and_changed_tokens_in_braces(llm):
    out = io.StringIO()
    output = shown(llm, out, structured_outputs=FORM)
    assert output.finished
    assert re.fullmatch(r"\{The\}\[ lamp of the harbour is number \](\{[0-9]\}|[0-9])\[ of nine\.\]\n", out.getvalue())


def test_on_a_terminal_they_have_colours(llm, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    shown(llm, out, structured_outputs=FORM)
    assert "\x1b[36m" in out.getvalue() and "[" not in out.getvalue().replace("\x1b[", "")


def test_a_text_that_the_grammar_allows_has_no_marks(llm):
    out = io.StringIO()
    output = shown(llm, out, structured_outputs={"regex": "(.|\n)*"})
    assert not set("[]{}") & set(out.getvalue()) and output.finished


def test_it_needs_one_prompt_and_a_grammar(capsys):
    assert main(["generate", "a", "b", "--regex", "x", "--show-constraints"]) == 1
    assert main(["generate", "a", "--show-constraints"]) == 1
    assert capsys.readouterr().err.count("give one prompt, and a grammar") == 2
