"""A file of prompts goes through a diffusion worker, batch after batch, and all of it is counted."""

import json
import sys

import pytest

import run_diffusion_worker as script
from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.textbook.diffusion.worker import DiffusionWorker
from jaxinfer.tokenizer import Tokenizer
from tests.builders import model_config, random_model

SETTINGS = {"block_size": 4, "threshold": 0.1, "page_size": 8, "cont_weight": 0.0}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(embedded_checkpoint())


def test_prompts_are_texts_conversations_and_token_ids(tokenizer):
    messages = [{"role": "user", "content": "Hello."}]
    lines = [json.dumps(each) for each in ("Hello.", messages, {"prompt_token_ids": [3, 5]})]
    assert script.read_prompts([lines[0], "", *lines[1:]], tokenizer) == [
        tokenizer.encode("Hello."), tokenizer.apply_chat_template(messages), [3, 5],
    ]  # fmt: skip


@pytest.mark.parametrize("line", ["{", "7", '{"prompt_token_ids": 3}'])
def test_what_is_no_prompt_is_refused_with_its_line(line, tokenizer):
    with pytest.raises(ValueError, match="^line 2: "):
        script.read_prompts(['"a"', line], tokenizer)
    with pytest.raises(ValueError, match="there is no prompt"):
        script.read_prompts([""], tokenizer)


def test_texts_need_a_tokenizer():
    assert script.read_prompts(['{"prompt_token_ids": [1]}'], None) == [[1]]
    with pytest.raises(ValueError, match="line 1: the checkpoint has no tokenizer"):
        script.read_prompts(['"a"'], None)


def test_batches_follow_each_other_and_all_of_their_requests_are_counted():
    model = random_model(model_config("LLaDAModelLM", mask_token_id=100), seed=5)
    worker = DiffusionWorker(None, None, model=model, **SETTINGS)
    prompts = [[1, 2, 3], [4, 5], [6]]
    together = list(script.run(worker, prompts, 2, max_new_tokens=6))
    assert [measured.requests for measured, _ in together] == [2, 1]
    assert [[len(answer) for answer in answers] for _, answers in together] == [[6, 6], [6]]
    assert all(measured.tokens == 6 * measured.requests for measured, _ in together)
    # No request takes more forwards than tokens, and at least one for each block.
    assert all(2 * each.requests <= each.forwards <= each.tokens for each, _ in together)
    alone = [answers for _, (answers,) in script.run(worker, prompts, 1, max_new_tokens=6)]
    assert alone == [answer for _, answers in together for answer in answers]
    total = script.Measured.total([measured for measured, _ in together])
    assert total.requests == 3 and total.tokens == 18
    cells = script.Measured(3, 18, 12, 2.0).cells("total")
    assert script.line_of(cells) == "| total | 3 | 18 | 12 | 1.50 | 9.0 |" and len(cells) == len(script.HEADINGS)


@pytest.mark.parametrize("architecture", script.RANDOM)
def test_a_file_goes_through_a_random_model(architecture, tmp_path, monkeypatch, capsys, tokenizer):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('"Hello."\n[{"role": "user", "content": "Hello."}]\n')
    arguments = ["--random", architecture, "--batch-size", "1", "--max-new-tokens", "4", "--block-size", "4",
                 "--cont-weight", "0", "--output", str(answers)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["run_diffusion_worker.py", str(prompts), *arguments])
    script.main()
    heading, _, first, second, total = capsys.readouterr().out.splitlines()
    assert heading == "| batch | requests | tokens | forwards | tokens a forward | tokens/s |"
    assert first.startswith("| 1 | 1 | 4 | ") and second.startswith("| 2 | 1 | 4 | ")
    assert total.startswith("| total | 2 | 8 | ")
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [each["text"] for each in found] == [tokenizer.decode(each["token_ids"]) for each in found]
