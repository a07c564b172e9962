"""Mailboxes: outputs that a reader has not taken yet are merged, so that a slow reader loses nothing."""

from __future__ import annotations

import threading
from dataclasses import replace

from jaxinfer.outputs import CompletionOutput, DenoisedBlock, Logprob, RequestOutput
from jaxinfer.scheduling.version_runs import Version, joined


class Mailbox:
    """Buffer between an engine's thread and the reader of one request.

    Args:
        name: the request's id, as its reader knows it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: RequestOutput | None = None  # merged outputs without their completions
        self._parts: dict[int, _Part] = {}  # merged completions by index
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Merge a new output. The time depends on its size, not on what already waits."""
        with self._lock:
            for completion in output.outputs:
                self._parts.setdefault(completion.index, _Part()).add(completion)
            before = self._waiting
            if before is not None:
                output = replace(
                    output,
                    finished=before.finished or output.finished,
                    prompt_logprobs=output.prompt_logprobs
                    if before.prompt_logprobs is None
                    else before.prompt_logprobs,
                    num_cached_tokens=max(before.num_cached_tokens, output.num_cached_tokens),
                    error=before.error if output.error is None else output.error,
                )
            self._waiting = output

    def fail(self, error: Exception) -> None:
        """Let the reader get this error after the outputs that wait."""
        with self._lock:
            self._error = error

    def take(self) -> RequestOutput | None:
        """Return all outputs since the last call, merged; None if there are none.

        Raises:
            Exception: the error given to `fail`, once all outputs are taken.
        """
        with self._lock:
            output, self._waiting = self._waiting, None
            parts, self._parts = self._parts, {}
            if output is None and self._error is not None:
                raise self._error
        if output is None:
            return None
        return replace(output, request_id=self._name, outputs=[parts[index].merged() for index in sorted(parts)])


class _Part:
    """Merged outputs of one completion."""

    def __init__(self) -> None:
        self._latest: CompletionOutput | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._sources: list[str] | None = None
        self._blocks: list[DenoisedBlock] | None = None
        self._versions: list[tuple[Version, int]] | None = None

    def add(self, new: CompletionOutput) -> None:
        before = self._latest
        if before is not None:
            new = replace(
                new,
                cumulative_logprob=(
                    before.cumulative_logprob if new.cumulative_logprob is None else new.cumulative_logprob
                ),
                finish_reason=before.finish_reason if new.finish_reason is None else new.finish_reason,
                stop_reason=before.stop_reason if new.finish_reason is None else new.stop_reason,
            )
        self._latest = new
        self._texts.append(new.text)
        self._token_ids += new.token_ids
        if new.logprobs is not None:
            self._logprobs = [] if self._logprobs is None else self._logprobs
            self._logprobs += new.logprobs
        if new.token_sources is not None:
            self._sources = [] if self._sources is None else self._sources
            self._sources += new.token_sources
        if new.blocks is not None:
            self._blocks = [] if self._blocks is None else self._blocks
            self._blocks += new.blocks
        if new.weights_versions is not None:
            self._versions = joined(self._versions or [], new.weights_versions)

    def merged(self) -> CompletionOutput:
        assert self._latest is not None
        if len(self._texts) == 1:
            return self._latest
        return replace(
            self._latest, text="".join(self._texts), token_ids=self._token_ids, logprobs=self._logprobs,
            token_sources=self._sources, blocks=self._blocks, weights_versions=self._versions,
        )  # fmt: skip
