"""The model card of the embedded target: of a training from nothing, and of one that continued it with tools."""

import re
from dataclasses import replace

import pytest

from jaxinfer.checkpoint.directory import embedded_checkpoint
from training.corpus import MIXTURE, TOOL_MIXTURE, held_out_cases
from training.evaluation import _shown
from training.model_card import (
    CARD_SAMPLES,
    TOOL_SAMPLES,
    RunFacts,
    Stage,
    draw_curve,
    read_stages,
    write_card,
    write_stages,
)
from training.scores import CHECKS, Score

FIRST = read_stages(embedded_checkpoint())[0]
SECOND = Stage(RunFacts(FIRST.facts.parameters, 6_200_000, 2000, 3600), 0.091, 0.034)


def card(path, stages) -> str:
    mixture = TOOL_MIXTURE if len(stages) > 1 else MIXTURE
    scores = [Score(kind, check, 19, 20, needed) for kind, check, _, needed in CHECKS if kind in mixture]
    cases = {kind: held_out_cases(kind, 1) for kind in (*CARD_SAMPLES, *TOOL_SAMPLES) if kind in mixture}
    shown = {kind: [_shown(each, each.answer) for each in found] for kind, found in cases.items()}
    write_card(path / "README.md", stages, scores, (1.5, 1.1), shown)
    return (path / "README.md").read_text()


def test_the_card_without_tools_says_nothing_of_them(tmp_path):
    text = card(tmp_path, [FIRST])
    assert "$" not in text
    assert not re.search(r"tool_|## Tools|--continue|tools_loss_curve", text)


def test_the_card_of_the_embedded_model_is_made_from_its_trainings(tmp_path):
    made = card(tmp_path, read_stages(embedded_checkpoint()))
    kept = (embedded_checkpoint() / "README.md").read_text()
    assert made.partition("## Scores")[0] == kept.partition("## Scores")[0]


def test_the_card_with_tools_has_both_trainings_their_pictures_and_commands(tmp_path):
    text = card(tmp_path, [FIRST, SECOND])
    assert "$" not in text
    assert (
        "1300 steps, 3.37 million tokens, 35 minutes" in text and "2000 steps, 6.20\nmillion tokens, 60 minutes" in text
    )
    assert "(loss_curve.png)" in text and "(tools_loss_curve.png)" in text
    assert text.index("python scripts/train_tiny.py  ") < text.index("python scripts/train_tiny.py --continue")
    assert "0.109 nats" in text and "0.091 nats" in text and "0.034 with tools" in text
    assert re.search(r"\| tool_call \| one call, name and arguments exact \| 19/20 \| 95.0% \| 80% \|", text)
    assert all(f"**{kind}**" in text for kind in TOOL_SAMPLES)


def test_a_card_of_tools_that_were_learned_twice_has_the_sums_the_last_losses_and_both_pictures(tmp_path):
    text = " ".join(card(tmp_path, [FIRST, replace(SECOND, tool_loss=0.05), SECOND]).split())
    assert "4000 steps, 12.40 million tokens, 120 minutes" in text and "It was done 2 times" in text
    assert "0.034 with tools" in text and "0.05 " not in text
    assert "(tools_loss_curve.png)" in text and "(tools_loss_curve_2.png)" in text
    first, second = (text.index(f"train_tiny.py --continue {rest}") for rest in ("#", "--seed 1 #"))
    assert first < second


def test_the_card_says_since_when_names_are_made_up(tmp_path):
    says = "From the third time on, half of the calls"
    assert says not in card(tmp_path, [FIRST, SECOND, SECOND])
    assert says in card(tmp_path, [FIRST, SECOND, SECOND, SECOND])


def test_the_record_of_trainings_makes_the_round_trip(tmp_path):
    write_stages(tmp_path, [FIRST, SECOND])
    assert read_stages(tmp_path) == [FIRST, SECOND]


def test_a_share_that_is_required_and_not_reached_is_named(tmp_path):
    write_card(tmp_path / "README.md", [FIRST], [Score("reading", "answer exact", 8, 10, 0.9)], (1.5, 1.1), {})
    assert "Not reached: reading (answer exact) 80.0%." in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("more", [{}, {"held_out_tools": [(0, 3.0), (50, 1.0)]}])
def test_the_picture_shows_every_curve_from_its_first_point(tmp_path, more):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    close = pyplot.close

    def look(figure):
        drawn.extend(list(map(float, line.get_xdata())) for line in figure.axes[0].lines)
        close(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", look)
        draw_curve({"training": [(50, 2.0), (100, 1.0)], "held_out": [(0, 1.5), (50, 1.0)], **more}, tmp_path / "x.png")
    assert drawn == [[50.0, 100.0], [0.0, 50.0], *([[0.0, 50.0]] if more else [])]
    assert (tmp_path / "x.png").stat().st_size > 1000
