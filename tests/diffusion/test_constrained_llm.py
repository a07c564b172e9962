"""Structured output of the embedded diffusion model, and what diffusion models refuse of it by name."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint.directory import EMBEDDED_DIFFUSION, find_checkpoint
from jaxinfer.config import EngineConfig
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.scheduling.request import Request
from jaxinfer.tokenizer import Tokenizer
from tests.builders import model_config

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 5000},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["place", "people", "size"],
    "additionalProperties": False,
}
REGEX = r"(Take|Find) [a-z]{2,9}, then (rest|work)\."
QUESTIONS = ("How many people live in Lantern Bay?", "Make a plan: plant a tree.", "How are you?")
JSON, MATCH = {"json": SCHEMA, "disable_any_whitespace": True}, {"regex": REGEX}


def params(structured: dict[str, Any] | None, **given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, "structured_outputs": structured, **given})


@pytest.fixture(scope="module")
def llm() -> LLM:
    limits: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    return LLM(EMBEDDED_DIFFUSION, dtype="float32", **limits, warm_up=False)


def ask(llm: LLM, questions: tuple[str, ...], each: list[SamplingParams]) -> list[Any]:
    messages = [[{"role": "user", "content": question}] for question in questions]
    return [completion for output in llm.chat(messages, each, use_tqdm=False) for completion in output.outputs]


@pytest.fixture(scope="module")
def alone(llm) -> list[Any]:
    """Answers by a schema and by an expression, each alone."""
    return [ask(llm, (question,), [params(how)])[0] for question, how in zip(QUESTIONS, (JSON, MATCH), strict=False)]


def test_an_answer_keeps_to_its_schema(alone):
    assert alone[0].finish_reason == "stop"
    jsonschema.validate(json.loads(alone[0].text), SCHEMA)


def test_an_answer_matches_its_expression(alone):
    assert alone[1].finish_reason == "stop" and re.fullmatch(REGEX, alone[1].text), alone[1].text


def test_answers_are_the_same_again_and_in_company(llm, alone):
    free = ask(llm, QUESTIONS[2:], [params(None)])
    found = ask(llm, (*QUESTIONS, *QUESTIONS[:2]), [params(how) for how in (JSON, MATCH, None, JSON, MATCH)])
    assert [one.token_ids for one in found] == [one.token_ids for one in (*alone, *free, *alone)]


def test_samples_are_those_of_their_seeds_and_an_output_may_be_cut(llm):
    together = ask(llm, QUESTIONS[1:2], [params(MATCH, temperature=1.0, seed=5, n=2, max_tokens=20)])
    each = [params(MATCH, temperature=1.0, seed=5 + number, max_tokens=20) for number in range(2)]
    assert [one.token_ids for one in together] == [ask(llm, QUESTIONS[1:2], [own])[0].token_ids for own in each]
    (cut,) = ask(llm, QUESTIONS[:1], [params(JSON, max_tokens=7)])
    assert cut.finish_reason == "length" and len(cut.token_ids) == 7
    metrics = llm.get_metrics()
    assert metrics.constraint_refusals_total > 0 and metrics.constraint_forced_tokens_total > 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find_checkpoint(EMBEDDED_DIFFUSION))


def processor(tokenizer: Tokenizer, family: str, **given: Any) -> InputProcessor:
    mask = tokenizer.fast.token_to_id("[MASK]")
    sizes = {} if family == "LLaDAModelLM" else {"block_size": 4}
    config = model_config(family, vocab_size=2048, mask_token_id=mask, **sizes)
    return InputProcessor(EngineConfig(max_model_len=64), config, {"eos_token_id": 2039}, tokenizer, **given)


def test_block_diffusion_models_take_grammars(tokenizer):
    (request,) = processor(tokenizer, "SDARForCausalLM").requests(["a"], params(MATCH), stream=False)
    assert isinstance(request, Request) and request.guard is not None


@pytest.mark.parametrize(
    ("family", "given", "more", "message"),
    [
        ("LLaDAModelLM", {}, {}, "structured_outputs is not for LLaDAModelLM, a bidirectional diffusion model"),
        ("SDARForCausalLM", {"edit_threshold": 0.5}, {}, "structured_outputs needs edit_threshold=None .* got 0.5"),
        ("SDARForCausalLM", {}, {"logprobs": 2}, "logprobs=2 is not for structured_outputs of a diffusion model"),
    ],
)
def test_what_cannot_follow_a_grammar_is_refused_by_name(family, given, more, message, tokenizer):
    made = processor(tokenizer, family, **given)
    with pytest.raises(ValueError, match=message):
        made.requests(["a"], params(MATCH, **more), stream=False)
    (free,) = made.requests(["a"], params(None, **more), stream=False)
    assert isinstance(free, Request) and free.guard is None
