"""A conversion's destination is what it was or complete, whatever happens on the way."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxinfer.checkpoint import CheckpointError, load_checkpoint
from jaxinfer.checkpoint import convert_checkpoint as convert
from jaxinfer.checkpoint.huggingface import HuggingFaceWeights
from tests.checkpoint.builders import write_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    write_checkpoint(tmp_path / "source")
    return tmp_path / "source"


def test_an_existing_destination_is_kept_unless_it_may_be_overwritten(tmp_path, source):
    convert(source, tmp_path / "out")
    (tmp_path / "out" / "note").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists"):
        convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "note").read_text() == "mine"
    convert(source, tmp_path / "out", dtype="bfloat16", overwrite=True)
    assert not (tmp_path / "out" / "note").exists()
    assert load_checkpoint(tmp_path / "out")[0].dtype == "bfloat16"
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_an_empty_directory_may_be_the_destination(tmp_path, source):
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out")
    load_checkpoint(tmp_path / "out")


def test_the_source_and_files_are_never_overwritten(tmp_path, source):
    with pytest.raises(FileExistsError, match="is the source"):
        convert(source, source, overwrite=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        convert(source, tmp_path / "file", overwrite=True)
    load_checkpoint(source)


@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_no_trace_and_can_be_run_again(tmp_path, source, monkeypatch, interruption):
    convert(source, tmp_path / "old")
    read, calls = HuggingFaceWeights.read, []

    def failing(self, name):
        calls.append(name)
        if len(calls) == 4:
            raise interruption
        return read(self, name)

    monkeypatch.setattr(HuggingFaceWeights, "read", failing)
    for destination, overwrite in (("out", False), ("old", True)):
        calls.clear()
        with pytest.raises(type(interruption)):
            convert(source, tmp_path / destination, dtype="bfloat16", overwrite=overwrite)
        assert len(calls) == 4
    assert sorted(os.listdir(tmp_path)) == ["old", "source"]
    assert load_checkpoint(tmp_path / "old")[0].dtype == "float32"
    monkeypatch.undo()
    convert(source, tmp_path / "out")
    load_checkpoint(tmp_path / "out")


def test_a_conversion_that_is_killed_is_not_taken_for_a_finished_one(tmp_path, source):
    script = """
        import os, signal, sys
        from jaxinfer.checkpoint import convert_checkpoint
        from jaxinfer.checkpoint.safetensors_reader import StoredTensor
        read, calls = StoredTensor.read, []
        def killed(self):
            calls.append(self)
            if len(calls) == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            return read(self)
        StoredTensor.read = killed
        convert_checkpoint(sys.argv[1], sys.argv[2], progress=False)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), source, tmp_path / "out"], cwd=ROOT, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".out.unfinished", "source"]
    with pytest.raises(FileNotFoundError, match="no checkpoint directory at .*/out"):
        load_checkpoint(tmp_path / "out")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / ".out.unfinished")
    convert(source, tmp_path / "out")
    load_checkpoint(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_two_conversions_to_one_destination_exclude_each_other(tmp_path, source):
    folder = tmp_path / ".out.unfinished"
    folder.mkdir()
    (folder / "part").write_text("of the other")
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FileExistsError, match="another conversion to .*/out is running"):
            convert(source, tmp_path / "out")
        assert (folder / "part").exists()
    finally:
        os.close(held)
    convert(source, tmp_path / "out")
