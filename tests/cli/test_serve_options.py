"""The options of `jaxinfer serve` say the defaults that `LLM` has."""

from __future__ import annotations

import inspect
import re

from jaxinfer.cli import serve
from jaxinfer.llm import LLM


def test_defaults_in_help_texts_are_those_of_the_engine():
    parameters = inspect.signature(LLM).parameters
    told = {}
    for name, text in serve._HELP.items():
        found = re.search(r"\(default: (\S+)\)$", text)
        if found is not None:
            told[name] = (found[1], str(parameters[name].default))
    assert len(told) > 8
    assert {name: pair for name, pair in told.items() if pair[0] != pair[1]} == {}
