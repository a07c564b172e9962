"""What benchmarks of speculation share: held-out prompts of the embedded checkpoint, and how they are served."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxinfer import LLM, RequestOutput, SamplingParams
from training.corpus import stream

METHODS = ("ngram", "draft_model", "eagle3")
MAX_TOKENS = 128
# A batch of few requests is over too soon to be timed: it is made of several batches one after the other.
FEWEST_REQUESTS = 16


def held_out_prompts(batch: int) -> list[Any]:
    """Prompts of all kinds that the target was trained on, for batches of so many."""
    prompts = [sample.prompt for sample in itertools.islice(stream(1, True), 1000) if sample.messages]
    return prompts[: max(batch, FEWEST_REQUESTS)]


def serve(llm: LLM, prompts: list[Any], batch: int, temperature: float) -> tuple[float, list[list[int]]]:
    """Seconds for all prompts, so many at a time, with nothing cached; and the tokens."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=MAX_TOKENS) for i in range(len(prompts))]
    outputs: list[RequestOutput] = []
    begin = time.perf_counter()
    for first in range(0, len(prompts), batch):
        outputs += llm.chat(prompts[first : first + batch], params[first : first + batch], use_tqdm=False)
    seconds = time.perf_counter() - begin
    return seconds, [output.outputs[0].token_ids for output in outputs]


def in_process(script: str, method: str) -> list[dict[str, Any]]:
    """The rows of one method, from a script that runs with the same arguments, in a process of its own.

    The programs of the engines of several methods need more memory maps than one process may have.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        given = [argument for argument in sys.argv[1:] if argument not in METHODS and argument != "--method"]
        command = [sys.executable, script, *given, "--method", method, "--json", str(file)]
        subprocess.run(command, check=True)
        return json.loads(file.read_text(encoding="utf-8"))["rows"]
