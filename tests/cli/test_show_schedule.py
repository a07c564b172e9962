"""The account of scheduling says what each launch computes, from the scheduler's own decisions."""

import io
import re

from jaxinfer.cli.show_schedule import tracing
from tests.builders import make_request, random_prompts, run_requests


def test_every_launch_and_every_token_is_written(idle_engine):
    core, out = idle_engine(), io.StringIO()
    requests = [make_request(f"req-{i}", p, max_tokens=10) for i, p in enumerate(random_prompts((9, 3, 5)))]
    with tracing(core, out) as trace:
        tokens = run_requests(core, requests)
    lines = out.getvalue().splitlines()
    assert lines[0] == "launch 1: 17 tokens of 3 requests"
    assert lines[1] == "  req-0 (new): prompt chunk, tokens 0 to 9 of 9, 3 pages"
    assert lines[3] == "  req-2 (new): prompt chunk, tokens 0 to 5 of 5, 2 pages"
    assert len([line for line in lines if line.startswith("launch ")]) == trace.num_launches > 1
    for index, own in enumerate(tokens):
        landed = re.findall(rf"landed for req-{index}: (\d+) tokens", out.getvalue())
        assert sum(map(int, landed)) == len(own) == 10
    assert out.getvalue().count("ended (length)") == 3


def test_nothing_is_traced_afterwards(idle_engine):
    core, out = idle_engine(), io.StringIO()
    with tracing(core, out):
        pass
    run_requests(core, [make_request("later", [1, 2, 3], max_tokens=2)])
    assert out.getvalue() == "" and not core.launch_listeners
