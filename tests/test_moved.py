"""Old names of modules lead to the same objects as the new ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from jaxinfer.moved import MOVED, MovedFinder

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_module(old):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MOVED[old]}"):
        found = importlib.import_module(old)
    new = importlib.import_module(MOVED[old])
    assert found is new is sys.modules[old]
    assert new.__name__ == new.__spec__.name == MOVED[old]


def test_a_file_of_an_old_name_would_hide_the_new_module():
    assert [old for old in MOVED if ROOT.joinpath(*old.split(".")).with_suffix(".py").exists()] == []


def test_the_finder_finds_no_other_module():
    assert MovedFinder().find_spec("jaxinfer.no_such_module", None) is None
    with pytest.raises(ModuleNotFoundError, match="jaxinfer.no_such_module"):
        importlib.import_module("jaxinfer.no_such_module")


def test_names_of_the_sources_come_from_their_old_modules_too():
    with pytest.warns(DeprecationWarning):
        sys.modules.pop("jaxinfer.speculative.generate", None)
        from jaxinfer.speculative.generate import speculative_generate
    from jaxinfer.textbook.speculative.generate import speculative_generate as same

    assert speculative_generate is same


def test_the_diffusion_worker_is_found_where_diffusion_is():
    from jaxinfer.textbook.diffusion.worker import DiffusionWorker

    assert importlib.import_module("jaxinfer.diffusion").DiffusionWorker is DiffusionWorker
