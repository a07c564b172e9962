"""Tools with names that have to be copied: the conversation stays the same, and its calls fit its tools."""

import random

import jsonschema
import pytest

from training.renamed import renamed
from training.tools import call, chain, series, two_calls


@pytest.mark.parametrize("make", [call, two_calls, chain, series])
def test_calls_fit_the_renamed_tools(make):
    num_other = num_names = 0
    for seed in range(200):
        old, new = make(random.Random(seed), False), renamed(make)(random.Random(seed), False)
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in new.tools}
        assert len(schemas) == len(old.tools)
        assert [each["function"]["description"] for each in new.tools] == [
            each["function"]["description"] for each in old.tools
        ]
        for before, after in zip(old.messages, new.messages, strict=True):
            assert before["content"] == after["content"]
            for one, other in zip(before.get("tool_calls", ()), after.get("tool_calls", ()), strict=True):
                made = other["function"]
                jsonschema.validate(made["arguments"], {**schemas[made["name"]], "additionalProperties": False})
                assert list(made["arguments"].values()) == list(one["function"]["arguments"].values())
                num_names += 1
                num_other += made["name"] != one["function"]["name"]
    assert 0.6 < num_other / num_names < 0.8


def test_names_stay_on_their_side_of_the_split():
    names = [
        {each["function"]["name"] for seed in range(300) for each in renamed(call)(random.Random(seed), held_out).tools}
        for held_out in (False, True)
    ]
    assert not names[0] & names[1]
