"""Rounds of blocks as lines: what is masked, what is new, and which block and round it is."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.cli.main import main
from jaxinfer.cli.show_denoising import BlockHistory, DenoisingPicture
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.engine.strategy import LandedRounds
from jaxinfer.tokenizer import Tokenizer

MASK = 2040


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(embedded_checkpoint())


def landed(
    *rounds: tuple[int, list[int]], ran: int | None = None, num_prompt_tokens: int = 1
) -> LandedRounds[DenoiseOutput]:
    """A launch in which a request in row 1 had these rounds: (start, tokens)."""
    starts = np.asarray([[-1, start] for start, _ in rounds])
    blocks = np.asarray([[[0] * len(tokens), tokens] for _, tokens in rounds])
    does = np.asarray([[False, index < (len(rounds) if ran is None else ran)] for index in range(len(rounds))])
    output: Any = SimpleNamespace(ran=does, start=starts, blocks=blocks)
    request: Any = SimpleNamespace(num_prompt_tokens=num_prompt_tokens)
    return LandedRounds([request], np.asarray([1]), output)


def test_rounds_are_counted_within_blocks_over_launches():
    history = BlockHistory()
    first = list(history.rounds(landed((4, [7, MASK]), (4, [7, 8]), (4, [7, 8]), num_prompt_tokens=6)))
    second = list(history.rounds(landed((6, [MASK, 3]), (6, [1, 2]), ran=1)))
    assert [(found.number, found.start) for found in (*first, *second)] == [(1, 4), (2, 4), (3, 4), (1, 6)]
    assert [found.is_new for found in (*first, *second)] == [
        (False, False), (False, True), (False, False), (True, True),
    ]  # fmt: skip


def test_what_a_block_has_of_the_prompt_is_not_new():
    history = BlockHistory()
    rounds = landed((4, [7, 8, 9, MASK]), (4, [7, 8, 9, 5]), num_prompt_tokens=6)
    first, second = history.rounds(rounds)
    assert first.is_new == (False, False, True, True)
    assert second.is_new == (False, False, False, True)


def test_a_picture_shows_masks_and_what_is_new(tokenizer):
    red, blue, dot = (tokenizer.encode(text, add_special_tokens=False) for text in (" the", " and", "."))
    assert len(red) == len(blue) == len(dot) == 1
    out = io.StringIO()
    picture = DenoisingPicture(tokenizer, MASK, out)
    picture(landed((0, [*red, MASK, MASK]), (0, [*red, MASK, *dot]), (0, [*red, *blue, *dot])))
    picture(landed((3, [MASK, *blue, *dot])))
    assert out.getvalue() == (
        "block at 0\n   1   the░░░░\n   2   the░░[.]\n   3   the[ and].\nblock at 3\n   1  ░░[ and.]\n"
    )
    assert picture.num_forwards == 4


def test_a_picture_of_nobody_is_empty(tokenizer):
    out = io.StringIO()
    nothing = landed((0, [1]))
    nothing.requests.clear()
    DenoisingPicture(tokenizer, MASK, out)(nothing)
    assert not out.getvalue()


def test_other_models_have_no_rounds_to_show(capsys):
    assert main(["generate", "a", "b", "--show-denoising"]) == 1
    assert "--show-denoising shows the blocks of one prompt: give one" in capsys.readouterr().err
    assert main(["generate", "a", "--show-denoising"]) == 1
    assert "--show-denoising goes with diffusion models" in capsys.readouterr().err
