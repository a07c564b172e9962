"""What one reader has not taken yet of its request, merged: however slowly it reads, joined outputs are the same."""

from __future__ import annotations

import threading
from dataclasses import replace

from jaxinfer.outputs import CompletionOutput, RequestOutput


class Mailbox:
    """Outputs on their way from the thread of an engine to the reader of one request.

    Args:
        name: the request's id, as its reader knows it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Add what is new."""
        output = replace(output, request_id=self._name)
        with self._lock:
            self._waiting = output if self._waiting is None else merged(self._waiting, output)

    def fail(self, error: Exception) -> None:
        """Nothing more will come, for this reason."""
        with self._lock:
            self._error = error

    def take(self) -> RequestOutput | None:
        """All that has come since the last call; None: nothing.

        Raises:
            Exception: what the mailbox has failed with, once everything before is taken.
        """
        with self._lock:
            output, self._waiting = self._waiting, None
            if output is None and self._error is not None:
                raise self._error
        return output


def merged(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """One output of two of the same request, of which `then` came later."""
    completions = {completion.index: completion for completion in first.outputs}
    for completion in then.outputs:
        before = completions.get(completion.index)
        completions[completion.index] = completion if before is None else _joined(before, completion)
    return replace(
        then,
        outputs=[completions[index] for index in sorted(completions)],
        finished=first.finished or then.finished,
        prompt_logprobs=then.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, then.num_cached_tokens),
        error=first.error if then.error is None else then.error,
    )


def _joined(first: CompletionOutput, then: CompletionOutput) -> CompletionOutput:
    logprobs = None
    if first.logprobs is not None or then.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(then.logprobs or ())]
    return replace(
        then,
        text=first.text + then.text,
        token_ids=[*first.token_ids, *then.token_ids],
        logprobs=logprobs,
        cumulative_logprob=first.cumulative_logprob if then.cumulative_logprob is None else then.cumulative_logprob,
        finish_reason=first.finish_reason if then.finish_reason is None else then.finish_reason,
        stop_reason=first.stop_reason if then.finish_reason is None else then.stop_reason,
    )
