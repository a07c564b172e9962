"""Speculation as users ask for it: by a configuration, on the embedded checkpoints and on others."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from jaxinfer import LLM, SamplingParams, SpeculativeConfig
from jaxinfer.checkpoint.directory import EMBEDDED_DRAFT, embedded_checkpoint
from jaxinfer.cli.show_drafts import drafts_line, print_drafts
from jaxinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput

LIMITS = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_tokens": 1024}
QUESTIONS = [
    [{"role": "user", "content": "Write a guide with three points: build a drum."}],
    [{"role": "user", "content": "Who works in the library?"}],
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=0.8, seed=7, max_tokens=60),
]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    return LLM(**LIMITS).chat(QUESTIONS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return LLM(**LIMITS, speculative_config=SpeculativeConfig("draft_model", adaptive=None))


def test_the_embedded_draft_model_drafts_for_the_embedded_target(drafting, plain):
    outputs = drafting.chat(QUESTIONS, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in plain]
    metrics = drafting.get_metrics()
    assert metrics.spec_decode_num_accepted_tokens > 0.6 * metrics.spec_decode_num_draft_tokens > 0


def test_the_embedded_head_drafts_trees_for_the_embedded_target(plain):
    llm = LLM(**{**LIMITS, "max_num_batched_tokens": 256}, speculative_config={"method": "eagle3", "adaptive": None})
    outputs = llm.chat(QUESTIONS, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    metrics = llm.get_metrics()
    assert metrics.spec_decode_num_accepted_tokens > 3 * metrics.spec_decode_num_drafts > 0
    assert metrics.spec_decode_num_draft_tokens == 59 * metrics.spec_decode_num_drafts


def test_streams_and_stop_strings_speculate_and_give_the_same_text(drafting, plain):
    text = plain[0].outputs[0].text
    stop = text[40:48]
    before = drafting.get_metrics().spec_decode_num_accepted_tokens
    deltas = list(drafting.stream(QUESTIONS[0], SamplingParams(temperature=0.0, max_tokens=60, stop=[stop])))
    assert "".join(delta.outputs[0].text for delta in deltas) == text[: text.index(stop)]
    assert deltas[-1].outputs[0].finish_reason == "stop" and len(deltas) > 2
    assert drafting.get_metrics().spec_decode_num_accepted_tokens > before


def test_tokens_say_whether_they_were_accepted_drafts(drafting):
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=40, n=2, return_token_sources=True)
    deltas = list(drafting.stream(QUESTIONS[0], params))
    found: list[list[str]] = [[], []]
    for part in [part for delta in deltas for part in delta.outputs]:
        assert part.token_sources is not None and len(part.token_sources) == len(part.token_ids)
        found[part.index] += part.token_sources
    assert [sources[0] for sources in found] == ["drawn", "drawn"]  # each answer begins with a draw
    metrics = deltas[-1].metrics
    assert metrics is not None
    assert sum(sources.count("draft") for sources in found) == metrics.num_accepted_tokens > 20
    assert drafting.chat([QUESTIONS[0]], PARAMS[0], use_tqdm=False)[0].outputs[0].token_sources is None


@pytest.mark.slow
def test_ngrams_by_a_dict_give_the_same_text(plain):
    llm = LLM(**LIMITS, speculative_config={"method": "ngram", "adaptive": None})
    outputs = llm.chat(QUESTIONS, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert llm.get_metrics().spec_decode_num_draft_tokens > 0


def test_a_drafter_takes_memory_of_its_own(drafting):
    budget = drafting.memory_budget
    assert budget.kv_bytes_per_token == (8 + 2) * 2 * 4 * 64 * 4  # layers, K and V, heads, their size, float32
    assert budget.weights_bytes > 4 * (5.2e6 + 1.7e6)


def altered_draft_model(directory: Path, change) -> Path:
    shutil.copytree(embedded_checkpoint(EMBEDDED_DRAFT), directory)
    change(directory)
    return directory


def another_word(directory: Path) -> None:
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    first, second = sorted(words)[200:202]
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(content))


def fewer_words(directory: Path) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 1024}))


def short_sight(directory: Path) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 128}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_word, "is token .* there and .* here"),
        (fewer_words, "vocabulary of 1024 tokens and the target one of 2048"),
        (short_sight, "max_position_embeddings"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused_by_what_differs(change, message, tmp_path):
    model = altered_draft_model(tmp_path / "draft", change)
    with pytest.raises(ValueError, match=message):
        LLM(**LIMITS, speculative_config={"method": "draft_model", "model": model})


def test_another_target_needs_a_draft_model_of_its_own(tmp_path):
    copy = shutil.copytree(embedded_checkpoint(), tmp_path / "copy")
    with pytest.raises(ValueError, match="needs model="):
        LLM(copy, **LIMITS, speculative_config={"method": "draft_model"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs a method"),
        ({"method": "magic"}, "method must be one of draft_model, ngram, eagle3, got 'magic'"),
        ({"method": "ngram", "gamma": 3}, "no field 'gamma'"),
        ({"method": "ngram", "model": "tiny-draft"}, "without a model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1"),
        ({"method": "ngram", "prompt_lookup_min": 5}, r"_min \(5\) must be at most prompt_lookup_max \(4\)"),
        ({"method": "ngram", "adaptive": "entropy"}, "has none"),
        ({"method": "ngram", "tree_depth": 3}, "tree_depth is of method='eagle3', got method='ngram'"),
        ({"method": "eagle3", "tree_top_k": 0}, "tree_top_k must be an integer of at least 1, got 0"),
        ({"method": "eagle3", "adaptive": "entropy", "gamma_max": 9}, r"gamma_max \(9\) must be at most 8, the most"),
        ({"method": "draft_model", "adaptive": "luck"}, "adaptive must be one of cost, entropy or None, got 'luck'"),
        ({"method": "draft_model", "gamma_min": 3, "gamma_max": 2}, r"gamma_min \(3\) must be at most gamma_max \(2\)"),
        ({"method": "draft_model", "egag_ema_beta": 1.0}, r"egag_ema_beta must be in \[0, 1\), got 1.0"),
        ({"method": "draft_model", "entropy_scale": 2}, "entropy_scale must be 'vocabulary', 'running' or .* got 2"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_with_its_value(fields, message):
    with pytest.raises(ValueError, match=message):
        LLM(speculative_config=fields)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "begin", "end"), [(io.StringIO(), "[", "]"), (Terminal(), "\x1b[32m", "\x1b[0m")])
def test_accepted_drafts_are_shown(out, begin, end, drafting, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    tokenizer = drafting.get_tokenizer()
    words = tokenizer.encode(" the market opens", add_special_tokens=False)
    texts = [tokenizer.decode([word]) for word in words]

    sources = ["drawn", *["draft"] * (len(words) - 2), "drawn"]

    def delta(first: int, last: int, finished: bool) -> RequestOutput:
        part = CompletionOutput(0, "", words[first:last], token_sources=sources[first:last])
        return RequestOutput("0", None, [1, 2, 3], [part], finished)

    print_drafts([delta(0, 1, False), delta(1, len(words), True)], tokenizer, out)
    assert out.getvalue() == f"{texts[0]}{begin}{''.join(texts[1:-1])}{end}{texts[-1]}\n"


def test_a_line_says_what_became_of_a_requests_drafts():
    metrics = RequestMetrics(0.0, num_drafts=5, num_draft_tokens=20, num_accepted_tokens=15)
    output = RequestOutput("0", None, [1], [], True, metrics=metrics)
    assert drafts_line(output) == "15 of 20 drafted tokens accepted (75%) in 5 rounds"
