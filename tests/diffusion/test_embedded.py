"""The embedded diffusion model: what it answers, alone and in company."""

from __future__ import annotations

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint.directory import EMBEDDED_DIFFUSION

LIMITS = {"dtype": "float32", "max_model_len": 192}
PLAN = "Make a plan with four points: bake bread."
QUESTIONS = (
    PLAN,
    "How are you?",
    "Repeat this sentence: The ship Drestomor sails to Kaluwick.",
    "Make a plan with three points: paint a fence.",
    "What can you do?",
    "Make a plan: plant a tree.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=80)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=48)


def ask(llm: LLM, questions: tuple[str, ...], params: SamplingParams) -> list[list[int]]:
    messages = [[{"role": "user", "content": question}] for question in questions]
    return [output.outputs[0].token_ids for output in llm.chat(messages, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(EMBEDDED_DIFFUSION, **LIMITS, max_num_seqs=1, enable_prefix_caching=False)


def test_it_answers_several_words_at_once(alone):
    questions = ("Repeat these names: Tavi, Brelodan, Kuso", "How many people live in Lantern Bay?")
    texts = [alone.get_tokenizer().decode(tokens).strip() for tokens in ask(alone, questions, GREEDY)]
    assert texts == ["Tavi, Brelodan, Kuso", "About nine hundred people live in Lantern Bay."]
    assert alone.get_metrics().diffusion_tokens_per_forward > 1.5


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_the_same_in_company(alone, params):
    questions = QUESTIONS + QUESTIONS[::-1]
    together = LLM(EMBEDDED_DIFFUSION, **LIMITS, max_num_seqs=4, kv_cache_tokens=192)
    found = ask(together, questions, params)
    assert together.get_metrics().num_preemptions_total > 0
    assert found == [tokens for question in questions for tokens in ask(alone, (question,), params)]
