"""Files of requests under Ray Data: several engines answer the lines of one file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.batch.lines import Line, count_lines, lines_of
from jaxinfer.batch.output import Output
from jaxinfer.batch.run import Counts, answer_line
from jaxinfer.integrations.ray_packages import RayError, connect, data, gpus_of
from jaxinfer.server.app import build_app
from jaxinfer.server.in_process import post
from jaxinfer.server.service import Service
from jaxinfer.server.settings import ServerSettings

# How often an engine is started again, and its lines are asked again: a line may be what ends it.
_MOST_TRIES = 2


class Answerer:
    """An engine that answers lines, many at once."""

    def __init__(self, options: Mapping[str, Any], settings: ServerSettings, model: str, time: int) -> None:
        service = Service(settings, model)
        service.open(AsyncLLM(**options))
        self._ask, self._time = partial(post, build_app(service)), time
        self._runner = asyncio.Runner()

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
        lines = [Line(**json.loads(str(line))) for line in batch["line"]]

        async def answers() -> list[dict[str, Any]]:
            return list(await asyncio.gather(*[answer_line(line, self._ask, self._time) for line in lines]))

        return {"answer": [json.dumps(each) for each in self._runner.run(answers())]}


def run(
    source: Path,
    output: Output,
    options: Mapping[str, Any],
    settings: ServerSettings,
    *,
    model: str,
    replicas: int,
    concurrency: int,
    progress: Callable[[Counts], None],
) -> Counts:
    """Answer every line of a file that is not answered yet, as `jaxinfer.batch.run.run` does.

    Args:
        options: of each engine, as `AsyncLLM` takes them.
        replicas: number of engines.
        concurrency: most lines that each is asked at once.

    Raises:
        ValueError: the output has the answers of another file.
        RuntimeError: an engine has failed; the lines before are answered.
    """
    counts = Counts(count_lines(source), output.check(lines_of(source)))
    progress(counts)

    def rows() -> Iterator[dict[str, str]]:
        for line in islice(lines_of(source), counts.before, None):
            yield {"line": json.dumps(asdict(line))}

    connect()
    data.DataContext.get_current().execution_options.preserve_order = True
    arguments = (dict(options), settings, model, int(source.stat().st_mtime))
    lines = data.from_items(list(rows()), override_num_blocks=max(1, -(-(counts.total - counts.before) // concurrency)))
    answered = lines.map_batches(
        Answerer, fn_constructor_args=arguments, batch_size=concurrency,
        compute=data.ActorPoolStrategy(size=replicas), max_restarts=_MOST_TRIES, max_task_retries=_MOST_TRIES,
        **gpus_of(options),
    )  # fmt: skip
    try:
        for row in answered.iter_rows():
            answer = json.loads(row["answer"])
            output.append(answer)
            counts.take(answer)
            progress(counts)
    except RayError as error:
        raise RuntimeError(f"an engine has failed: {error}") from error
    return counts
