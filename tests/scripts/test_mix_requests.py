"""The hour of random requests of every kind, with an engine that is scripted."""

import asyncio
import collections
from types import SimpleNamespace
from typing import Any

import numpy as np

from mix_requests import mix, random_params


def test_every_setting_occurs_alone_and_beside_others():
    drawn = [random_params(np.random.default_rng(seed)) for seed in range(300)]
    settings = {
        "n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None, "allowed_token_ids": None,
        "bad_words": None, "stop": None, "ignore_eos": False, "min_tokens": 0, "logprobs": None,
        "prompt_logprobs": None, "structured_outputs": None,
    }  # fmt: skip
    found = collections.Counter(
        name for params in drawn for name, default in settings.items() if getattr(params, name) not in (default, [], ())
    )
    assert set(found) == set(settings) and min(found.values()) > 10


class ScriptedLLM:
    """Serves requests; every tenth conversation fails."""

    def __init__(self):
        self.calls = collections.Counter()

    def _output(self):
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2])])

    async def chat(self, prompt, params, output_kind="delta"):
        self.calls["chat"] += 1
        number = self.calls["chat"]
        await asyncio.sleep(0)
        if number % 10 == 0:
            raise RuntimeError("planted")
        yield self._output()

    async def add(self, prompt, params):
        return self.chat(prompt, params)

    async def generate_branches(self, prefix, suffixes, params, mode, output_kind):
        self.calls[mode] += 1
        await asyncio.sleep(0)
        yield self._output()

    async def skeleton_of_thought(self, question, params):
        self.calls["skeleton"] += 1
        await asyncio.sleep(0)

    async def beam_search(self, question, params):
        self.calls["beams"] += 1
        await asyncio.sleep(0)

    async def reset_prefix_cache(self):
        self.calls["reset"] += 1
        await asyncio.sleep(0)


def test_requests_of_every_kind_are_sent_and_what_fails_is_named():
    llm: Any = ScriptedLLM()
    tally, errors = asyncio.run(mix(llm, seconds=2.0, clients=4, seed=0))
    calls = llm.calls
    assert errors == ["RuntimeError: planted"] * (calls["chat"] // 10) and len(errors) > 0
    # A client that is in the midst of a request at the end finishes it.
    assert tally["request"] + tally["stream"] + tally["leave"] == calls["chat"] - len(errors)
    assert tally["branches"] == calls["in_one_sequence"] + calls["batching"] > 0 < calls["in_one_sequence"]
    assert [tally[kind] for kind in ("skeleton", "beams", "reset")] == [
        calls[kind] for kind in ("skeleton", "beams", "reset")
    ]
    assert min(calls.values()) > 0
    assert tally["tokens"] == 2 * (tally["request"] + tally["stream"] + tally["branches"])
