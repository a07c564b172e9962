"""Marks of output tokens become one source for each token."""

from jaxinfer.scheduling.token_marks import TokenMarks


def test_tokens_without_a_mark_were_drawn():
    assert TokenMarks().sources(3, 6) == ["drawn"] * 3
    assert TokenMarks([1], [2], [3]).sources(4, 5) == ["drawn"] and TokenMarks([1]).sources(1, 1) == []


def test_each_mark_is_the_source_of_its_token_in_any_part_of_the_output():
    marks = TokenMarks(accepted_at=[1, 2, 7], redrawn_at=[4], forced_at=[5, 6])
    whole = ["drawn", "draft", "draft", "drawn", "redrawn", "forced", "forced", "draft", "drawn"]
    assert marks.sources(0, 9) == whole
    for cut in range(10):
        assert marks.sources(0, cut) + marks.sources(cut, 9) == whole


def test_a_draft_that_a_mask_has_changed_was_drawn_again():
    assert TokenMarks(accepted_at=[0, 1], redrawn_at=[0]).sources(0, 2) == ["redrawn", "draft"]


def test_marks_of_tokens_that_never_landed_are_forgotten():
    marks = TokenMarks([1, 2, 7], [3, 4], [5, 6])
    marks.cut(4)
    assert marks == TokenMarks([1, 2], [3], [])
