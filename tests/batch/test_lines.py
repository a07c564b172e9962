"""Lines of a file of requests: those that cannot be asked say why."""

from __future__ import annotations

import json

import pytest

from jaxinfer.batch.lines import count_lines, lines_of

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def read(tmp_path, *lines: object) -> list:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    found = list(lines_of(path))
    assert count_lines(path) == len(found)
    return found


def test_blank_lines_count_in_numbers_alone(tmp_path):
    first, second = read(tmp_path, GOOD, "", {**GOOD, "custom_id": "b"})
    assert (first.number, first.custom_id, first.url, first.body, first.error) == (
        1, "a", "/v1/completions", {"prompt": "x"}, None,
    )  # fmt: skip
    assert (second.number, second.custom_id, second.error) == (3, "b", None)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "not JSON: "),
        ("[1]", "must be an object, got list"),
        ("[" * 100_000, "not JSON: "),
        ({"url": "/v1/completions"}, "custom_id must be a string, got None"),
        ({**GOOD, "method": "GET"}, "method must be POST, got 'GET'"),
        ({**GOOD, "url": "/v1/embeddings"}, "url must be one of "),
        ({**GOOD, "body": "x"}, "body must be an object, got str"),
        ({**GOOD, "body": {"stream": True}}, "stream: a line of a file has one answer"),
        ({**GOOD, "url": "/v1/responses", "body": {"background": True}}, "background and previous_response_id need"),
        ({**GOOD, "more": 1}, "unknown fields more; known are custom_id"),
    ],
)
def test_a_line_that_cannot_be_asked_says_why(tmp_path, line, error):
    [found] = read(tmp_path, line)
    assert found.error is not None and found.error.startswith(error)


def test_a_custom_id_is_that_of_one_line(tmp_path):
    found = read(tmp_path, GOOD, GOOD, {**GOOD, "custom_id": "b"})
    assert [line.error for line in found] == [None, "custom_id is that of line 1", None]
