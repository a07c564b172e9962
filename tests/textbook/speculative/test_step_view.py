"""The debug view: colours on a terminal, plain ASCII elsewhere, texts where there is a tokenizer."""

import io
import re

import jax
import numpy as np
import pytest

from jaxinfer.speculative.egag import EntropyReading
from jaxinfer.textbook.speculative.chain_drafters import Proposal
from jaxinfer.textbook.speculative.classic_rule import Verdict
from jaxinfer.textbook.speculative.generate import (
    MultinomialProcessor,
    NGramStorage,
    autoregressive_generate,
    beam_search_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from jaxinfer.textbook.speculative.logits_processors import softmax
from jaxinfer.textbook.speculative.step_view import Round, StepView
from tests.textbook.speculative.toys import table_model

ROUND = Proposal([3, 1, 2], np.full((3, 4), 0.25), [0.25, 0.25, 0.25], EntropyReading(0.12, 0.4, 3))
P = np.full((4, 4), 0.155)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Words:
    def decode(self, token_ids, skip_special_tokens=True):
        assert not skip_special_tokens
        return "".join(("zero", " \u00e9t\u00e9", "\n", "three")[token] for token in token_ids)


def shown(out, verdict, tokenizer=None, num_landed=None):
    landed = num_landed or verdict.num_accepted + 1
    generated = [0, *[*ROUND.tokens[: verdict.num_accepted], verdict.token][:landed]]
    StepView(tokenizer, out).speculative_step(Round(10, ROUND, verdict, verdict.draws, P, landed, generated))
    return out.getvalue()


def test_elsewhere_than_on_a_terminal_a_round_is_plain_ascii():
    text = shown(io.StringIO(), Verdict(1, 2, (1.0, 0.62), (0.3, 0.75)), Words())
    assert text.isascii() and "\x1b" not in text
    assert text.splitlines() == [
        "========== Speculative Step ==========",
        "Position: 10, Gamma: 3, Accepted: 1",
        "Entropy: 0.120 of ln V, smoothed 0.400, gamma 3",
        "Drafts:",
        '  [10]: 3 "three" (q=0.25, p=0.15) +: r=0.30 < p/q=1.00',
        '  [11]: 1 " \\xe9t\\xe9" (q=0.25, p=0.15) x rejected: r=0.75 >= p/q=0.62',
        '  [12]: 2 "\\n" (q=0.25) x after a rejection',
        "Target:",
        '  [11]: 2 "\\n" (p=0.15, in place of the rejected draft)',
        'Generated: "zerothree\\n"',
    ]


def test_on_a_terminal_accepted_rejected_and_added_tokens_have_their_colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(Terminal(), Verdict(1, 2, (1.0, 0.62)), Words())
    assert re.search("\x1b\\[32m[^\x1b]*three[^\x1b]*\u2713", text)
    assert re.search("\x1b\\[31m[^\x1b]*\u00e9t\u00e9[^\x1b]*\u2717 rejected", text)
    assert re.search('\x1b\\[34m2 "\\\\n"\x1b', text)


def test_no_color_makes_a_terminal_plain(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(Terminal(), Verdict(3, 0, (1.0, 1.0, 1.0)))
    assert text.isascii() and "\x1b" not in text and "[13]: 0 (p=0.15, bonus token)" in text
    assert text.endswith("Generated: 0 3 1 2 0\n")


def test_no_bonus_token_is_shown_behind_an_accepted_end_token():
    assert "Target" not in shown(io.StringIO(), Verdict(3, 0, (1.0, 1.0, 1.0)), num_landed=3)


TARGET = table_model(4, 1)
FUNCTIONS = {
    "plain": lambda **arguments: (autoregressive_generate([1, 2], TARGET, **arguments), 0.0),
    "beams": lambda **arguments: (beam_search_generate([1, 2], TARGET, **arguments), 0.0),
    "speculative": lambda **arguments: speculative_generate([1, 2], table_model(4, 2), TARGET, **arguments),
    "n-grams": lambda **arguments: ngram_assisted_speculative_generate([1, 2], NGramStorage(2, 4), TARGET, **arguments),
}


@pytest.mark.parametrize("eos", range(4))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_debugging_prints_and_changes_nothing(capsys, name, eos):
    quiet = FUNCTIONS[name](max_gen_len=8, eos_tokens_id=eos)
    assert capsys.readouterr().out == ""
    assert FUNCTIONS[name](max_gen_len=8, eos_tokens_id=eos, debug=True) == quiet
    text = capsys.readouterr().out
    assert text.isascii() and ("End token" in text) == (quiet[0][-1] == eos)
    assert name == "plain" or " Step =" in text or "First Token" in text


def test_greedy_decoding_shows_what_both_models_believe_and_no_random_number(capsys):
    drafter = table_model(4, 2)
    tokens, _ = speculative_generate([1, 2], drafter, TARGET, gamma=1, max_gen_len=3, eos_tokens_id=3, debug=True)
    text = capsys.readouterr().out
    assert "r=" not in text
    draft = re.search(r"\[3\]: (\d) \(q=([\d.]+), p=([\d.]+)\)", text)
    at = [1, 2, tokens[0]]
    for model, shown_as in ((drafter, draft[2]), (TARGET, draft[3])):
        assert shown_as == f"{softmax(model.logits_after(at))[int(draft[1])]:.2f}" != "1.00"


def test_sampled_drafts_are_shown_with_the_numbers_that_decided(capsys):
    tokens, _ = speculative_generate(
        [1, 2], table_model(4, 2), TARGET, max_gen_len=40, eos_tokens_id=[],
        logits_processor=MultinomialProcessor(1.0), key=jax.random.key(1), debug=True,
    )  # fmt: skip
    text = capsys.readouterr().out
    compared = re.findall(r"r=([\d.]+) (<|>=) p/q=([\d.]+)", text)
    assert {sign for _, sign, _ in compared} == {"<", ">="}
    assert all(float(r) <= float(ratio) if sign == "<" else float(r) >= float(ratio) for r, sign, ratio in compared)
    assert text.endswith(f"Generated: {' '.join(map(str, tokens))}\n")
