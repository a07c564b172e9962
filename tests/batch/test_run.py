"""Runs over files of requests, killed at any moment: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from jaxinfer.batch.lines import lines_of
from jaxinfer.batch.output import Output
from jaxinfer.batch.run import run
from jaxinfer.batch.stable import stable, with_seed


def write(path, count: int) -> None:
    lines = [
        {"custom_id": f"id {i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": str(i)}}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")


class Killed(BaseException):
    """The end of a process."""


class Engine:
    """Answers in another order than it is asked; ids, times and cached tokens are new every time."""

    def __init__(self, rng: random.Random, *, dies_after: int | None = None) -> None:
        self.rng, self.left, self.most, self.now = rng, dies_after, 0, 0
        self.asked: list[str] = []

    async def __call__(self, url: str, body: dict[str, Any], name: str) -> tuple[int, dict[str, Any]]:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(self.rng.randrange(20)):
            await asyncio.sleep(0)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed
        self.now -= 1
        self.asked.append(body["prompt"])
        if body["prompt"] == "7":
            return 400, {"error": {"message": "no", "code": None}}
        usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": self.rng.randrange(9)}}
        text = f"{body['prompt']} {body['seed']}"
        call = f"call_{self.rng.randrange(10**9)}"
        return 200, {
            "id": f"cmpl-{self.rng.randrange(10**9)}", "created": self.rng.randrange(10**9), "usage": usage,
            "choices": [{"text": text, "tool_calls": [{"id": call}, {"call_id": call}]}],
        }  # fmt: skip


def answered(source, target, engine: Engine, **options: Any) -> Any:
    with Output(target) as output:
        return asyncio.run(run(source, output, engine, **{"concurrency": 4, **options}))


def test_answers_are_in_the_order_of_the_lines_and_errors_are_lines(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, 20)
    engine = Engine(random.Random(0))
    counts = answered(source, target, engine)
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [f"id {i}" for i in range(20)] + [None]
    assert (counts.total, counts.done, counts.before, counts.failed) == (21, 21, 0, 2)
    assert engine.asked != sorted(engine.asked) and engine.most == 4
    assert found[3]["response"]["status_code"] == 200 and found[3]["error"] is None
    assert found[3]["response"]["body"]["choices"][0]["text"].startswith("3 ")
    assert found[7]["response"]["status_code"] == 400
    assert found[7]["error"] == {"code": "invalid_request", "message": "no"}
    assert found[20]["response"] is None and found[20]["error"]["message"].startswith("line 21: not JSON")


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_killed_at_any_moment_is_continued_line_for_line(seed, tmp_path):
    source, whole, target = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write(source, 30)
    answered(source, whole, Engine(random.Random(seed)))
    rng, asked = random.Random(seed), 0
    for _ in range(100):
        engine = Engine(rng, dies_after=rng.randrange(12))
        try:
            answered(source, target, engine)
            break
        except Killed:
            raw = target.read_bytes()
            target.write_bytes(raw[: len(raw) - rng.randrange(40)])  # the last write was not whole
        asked += len(engine.asked)
    assert target.read_bytes() == whole.read_bytes()
    assert asked


def test_the_answers_of_another_file_are_not_continued(tmp_path):
    source, other, target = (tmp_path / name for name in ("in.jsonl", "other.jsonl", "out.jsonl"))
    write(source, 5)
    write(other, 3)
    answered(source, target, Engine(random.Random(0)))
    with Output(target) as output, pytest.raises(ValueError, match="line 4 is for 'id 3', the input has None there"):
        output.check(lines_of(other))
    target.write_text('{"what": 1}\n')
    with Output(target) as output, pytest.raises(ValueError, match="is no file of answers: line 1 has no custom_id"):
        output.check(lines_of(source))


def test_one_process_at_a_time_writes_a_file(tmp_path):
    with Output(tmp_path / "out.jsonl"), pytest.raises(RuntimeError, match="is written by another process"):
        Output(tmp_path / "out.jsonl")


def test_a_dead_engine_ends_the_run_and_keeps_what_was_answered(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, 10)

    class Dying(Engine):
        async def __call__(self, url, body, name):
            if body["prompt"] == "6":
                return 503, {"error": {"message": "dead"}}
            return await super().__call__(url, body, name)

    with pytest.raises(RuntimeError, match="line 7: .*dead"):
        answered(source, target, Dying(random.Random(0)), concurrency=1)
    assert len(target.read_text().splitlines()) == 6


def test_a_seed_follows_from_the_custom_id_and_a_given_one_stays(tmp_path):
    write(tmp_path / "in.jsonl", 2)
    first, second, _ = lines_of(tmp_path / "in.jsonl")
    assert with_seed(first) == with_seed(first) and with_seed(first)["seed"] != with_seed(second)["seed"]
    assert first.body is not None
    first.body["seed"] = 0
    assert with_seed(first)["seed"] == 0


def test_equal_ids_stay_equal_and_texts_stay_as_they_are(tmp_path):
    write(tmp_path / "in.jsonl", 1)
    line = next(iter(lines_of(tmp_path / "in.jsonl")))
    answer = {"id": "resp_1", "output": [{"id": "msg_2", "text": "resp_1"}, {"call_id": "resp_1"}], "created_at": 5.0}
    found = stable(answer, line, 9)
    assert found["id"].startswith("resp_") and found["id"] == found["output"][1]["call_id"] != answer["id"]
    assert found["output"][0]["id"].startswith("msg_") and found["output"][0]["text"] == "resp_1"
    assert found["created_at"] == 9
