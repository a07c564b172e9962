"""Progress of a wait for a compile: it names the program, and disappears when the compile is over."""

import sys

import pytest

from jaxinfer.frontend import progress
from jaxinfer.frontend.progress import CompileNotice, GenerationProgress
from tests.tiny_checkpoints import open_llm, write_checkpoint


@pytest.mark.parametrize(("kept", "words"), [(True, ", kept on disk for the next run"), (False, "")])
def test_the_bar_says_what_is_compiled_and_where_it_goes(kept, words, monkeypatch, capfd):
    monkeypatch.setattr(progress, "keeps_compiled_programs", lambda: kept)
    with GenerationProgress(2, enabled=True) as bar:
        bar.compiling("step for 4 decodes")
        assert capfd.readouterr().err.rstrip("]\r ").endswith(f"compiling step for 4 decodes{words}")
        bar.compiled()
        assert "compiling" not in capfd.readouterr().err.split("\r")[-1]


def test_generate_shows_its_compiles_on_the_bar(tmp_path, capfd):
    llm = open_llm(write_checkpoint(tmp_path / "checkpoint"))
    llm.generate("Say a")
    assert "compiling step for" in capfd.readouterr().err
    assert llm.core.compile_listeners == []


def test_a_stream_says_it_on_a_line_that_goes_away(monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    notice = CompileNotice()
    notice.compiling("decode loop")
    assert "compiling decode loop" in capfd.readouterr().err
    notice.compiled()
    assert capfd.readouterr().err.split("\r")[-1].strip() == ""


def test_a_stream_whose_errors_go_to_a_file_says_nothing(capfd):
    notice = CompileNotice()
    notice.compiling("decode loop")
    notice.compiled()
    assert capfd.readouterr().err == ""
