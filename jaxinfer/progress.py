"""The progress bar of `generate` and `chat`."""

from __future__ import annotations

import time
from types import TracebackType

from tqdm import tqdm

from jaxinfer.outputs import RequestOutput


class GenerationProgress:
    """Finished requests, with input and output tokens per second so far."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = tqdm(
            total=total, disable=not enabled, desc="Processed prompts", unit="prompt", dynamic_ncols=True,
            postfix="input: 0.0 tok/s, output: 0.0 tok/s",
        )  # fmt: skip
        self._start = time.perf_counter()
        self._input_tokens = 0
        self._output_tokens = 0

    def update(self, output: RequestOutput) -> None:
        """Count a finished request."""
        self._input_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._input_tokens / seconds:.1f} tok/s, output: {self._output_tokens / seconds:.1f} tok/s",
            refresh=False,
        )
        self._bar.update()

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
