"""Engines of every way of decoding, each with requests that it serves alone and beside others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.branching.beam_search import BeamSearch, BeamSearchParams
from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.engine.core import EngineCore
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.strategies.beams import BeamRun
from jaxinfer.tokenizer import Tokenizer
from tests.branching.builders import make_group
from tests.builders import make_engine, make_request, model_config, random_model, random_prompts
from tests.constraints.toys import automata
from tests.diffusion import bidirectional_builders as bidirectional
from tests.diffusion.builders import MASK, diffusion_engine, diffusion_model_config
from tests.speculative.builders import disturbed, random_head, speculating_engine

MOST_TOKENS = 12
EOS = 100
_, HALF, _, RUNS = automata(101, EOS)
_, HALF_OF_BLOCKS, *_ = automata(101, MASK - 1)

type Item = Request | RequestGroup | Callable[[EngineCore], BeamRun]


@dataclass(frozen=True)
class Way:
    """A way of decoding.

    Attributes:
        make: makes its engine.
        items: what arrives before each of the first steps, alone or beside others; new objects in every call.
    """

    name: str
    make: Callable[[], EngineCore]
    items: Callable[[bool], Mapping[int, list[Item]]]


def tokenizer() -> Tokenizer:
    """One whose first tokens are those of the random models."""
    return Tokenizer(embedded_checkpoint())


def _plain(beside: bool) -> dict[int, list[Item]]:
    first, second, third, fourth = random_prompts((21, 9, 110, 90), seed=1)
    items: dict[int, list[Item]] = {0: [make_request("a", first, max_tokens=MOST_TOKENS, stream=True)]}
    if beside:
        sampled = make_request("b", second, max_tokens=9, temperature=1.0, seed=4, logprobs=2, prompt_logprobs=1)
        penalized = make_request(
            "c", third, max_tokens=MOST_TOKENS, temperature=0.8, seed=5, presence_penalty=0.5, stream=True
        )
        items[1] = [sampled]
        # The pool holds 160 tokens, fewer than these two: one of them is preempted.
        items[3] = [penalized, make_request("d", fourth, max_tokens=10, temperature=1.0, seed=9, top_k=20)]
        items[6] = [make_request("e", [*first, 3], max_tokens=6)]
        # One whose draws are refused now and then, and one with runs of tokens that follow in any case.
        half = {"constraint": HALF, "temperature": 0.9, "seed": 6, "top_p": 0.9}
        items[5] = [make_request("f", second[:5], max_tokens=11, eos_token_ids=[EOS], **half)]
        runs = {"constraint": RUNS, "temperature": 0.8, "seed": 7, "logprobs": 1}
        items[5] += [make_request("h", second[:4], max_tokens=14, stream=True, eos_token_ids=[EOS], **runs)]
        items[4] = [make_group("g", second, [[1], [2, 3]], max_tokens=5, temperature=1.0)]
    return items


def _branched(beside: bool) -> dict[int, list[Item]]:
    prefix, other = random_prompts((14, 9), seed=2)
    suffixes = random_prompts((3, 2, 5), seed=3)
    items: dict[int, list[Item]] = {
        0: [make_group("g", prefix, suffixes, max_parallel=2, max_tokens=8, temperature=0.7, stream=True)]
    }
    if beside:
        items[2] = [make_request("a", other, max_tokens=MOST_TOKENS, stream=True, logprobs=1)]
        items[4] = [make_group("h", [*prefix, 5], [[7], [8]], max_tokens=6)]
    return items


def _beam(beside: bool) -> dict[int, list[Item]]:
    prompt, other, third = random_prompts((14, 9, 11), seed=4)

    def run(name: str, prompt: list[int], width: int) -> Callable[[EngineCore], BeamRun]:
        params = BeamSearchParams(width, 6)
        return lambda core: BeamRun(core, name, prompt, BeamSearch(params, frozenset({4, 17}))).start()

    items: dict[int, list[Item]] = {0: [run("beams", prompt, 3)]}
    if beside:
        items[1] = [make_request("a", other, max_tokens=MOST_TOKENS, stream=True)]
        items[2] = [run("others", third, 2)]
    return items


def _denoised(beside: bool) -> dict[int, list[Item]]:
    first, second, third = random_prompts((18, 7, 11), seed=5, vocab_size=MASK)
    items: dict[int, list[Item]] = {0: [make_request("a", first, max_tokens=MOST_TOKENS, stream=True)]}
    if beside:
        items[1] = [make_request("b", second, max_tokens=9, temperature=0.8, seed=3, logprobs=2)]
        items[2] = [make_request("c", third, max_tokens=10, temperature=0.5, seed=8, stream=True)]
        items[3] = [make_request("d", [*first, 5], max_tokens=7)]
    return items


def _blocks(beside: bool) -> dict[int, list[Item]]:
    items = _denoised(beside)
    if beside:
        constrained = {"constraint": HALF_OF_BLOCKS, "temperature": 0.7, "seed": 6, "stream": True}
        items[4] = [make_request("e", [5, 6, 7], max_tokens=9, eos_token_ids=[MASK - 1], **constrained)]
    return items


# Nearly all of the time goes to compiling: one layer, steps of one size with prompts, and trees that fit into it.
TREES = {"num_speculative_tokens": 4, "tree_depth": 2, "tree_top_k": 2}
SMALL = {"max_num_batched_tokens": 20}


def _model() -> Any:
    return random_model(model_config(num_layers=1))


def _engine() -> EngineCore:
    return make_engine(_model(), **SMALL, kv_cache_tokens=160)


def _speculating(method: str) -> EngineCore:
    model = _model()
    if method == "ngram":
        return speculating_engine(model, **SMALL)
    if method == "draft_model":
        return speculating_engine(model, disturbed(model, 0.1), **SMALL)
    return speculating_engine(model, random_head(model.config, capture=(0,)), speculative=TREES, **SMALL)


WAYS = {
    way.name: way
    for way in (
        Way("plain", _engine, _plain),
        Way("branched", _engine, _branched),
        Way("beam", _engine, _beam),
        Way("ngram", lambda: _speculating("ngram"), _plain),
        Way("draft_model", lambda: _speculating("draft_model"), _plain),
        Way("eagle3", lambda: _speculating("eagle3"), _plain),
        Way("block", lambda: diffusion_engine(random_model(diffusion_model_config())), _blocks),
        Way(
            "bidirectional",
            lambda: bidirectional.engine_of(
                random_model(bidirectional.bidirectional_config()),
                bidirectional.diffusion_config(**bidirectional.CACHES["vicinity"], **bidirectional.SMOOTH),
            ),
            _denoised,
        ),
    )
}
