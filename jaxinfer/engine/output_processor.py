"""From tokens that land to what a user sees: text, stop strings, deltas or whole outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.detokenizer import IncrementalDetokenizer
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.tokenizer import Tokenizer


@dataclass
class _Follower:
    """What is kept of one request until its last output."""

    inbox: deque[RequestOutput]
    stream: bool
    detokenizer: IncrementalDetokenizer | None
    num_streamed: int = 0  # output tokens that earlier deltas held


class OutputProcessor:
    """Turns tokens into outputs and puts these into the inbox of whoever asked for the request."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._followers: dict[str, _Follower] = {}

    def follow(self, request: Request, inbox: deque[RequestOutput], *, stream: bool) -> None:
        """Send `inbox` the request's output when it is finished, or, with `stream`, what is new at every step.

        Without stop strings or streaming, text is not made before the end.
        """
        params = request.sampling_params
        detokenizer = None
        if self._tokenizer is not None and params.detokenize and (stream or params.stop_strings):
            detokenizer = IncrementalDetokenizer(self._tokenizer, request.prompt_token_ids, params)
        self._followers[request.request_id] = _Follower(inbox, stream, detokenizer)

    def process(self, landed: Sequence[tuple[Request, int]]) -> None:
        """Take the tokens of one step."""
        for request, token in landed:
            follower = self._followers[request.request_id]
            if follower.detokenizer is not None:
                self._detokenize(request, token, follower.detokenizer)
            if request.is_finished:
                self.close(request)
            elif follower.stream:
                self._send_delta(request, follower)

    def close(self, request: Request) -> None:
        """Send the last output of a finished request and forget it."""
        follower = self._followers.pop(request.request_id)
        if follower.detokenizer is not None:
            follower.detokenizer.finish()  # an abort may leave a character incomplete
        if follower.stream:
            self._send_delta(request, follower)
        else:
            text = self._whole_text(request, follower.detokenizer)
            follower.inbox.append(_output(request, text, request.output_token_ids))

    def _detokenize(self, request: Request, token: int, detokenizer: IncrementalDetokenizer) -> None:
        matched = None
        if not _ended_by_token(request) or request.sampling_params.include_stop_str_in_output:
            matched = detokenizer.append(token)
        if matched is None and request.is_finished:
            matched = detokenizer.finish()
        if matched is not None:
            if not request.is_finished:
                self._core.finish(request, RequestStatus.FINISHED_STOPPED)
            # A stop string that the last allowed token completes is a stop, not a length.
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = matched

    def _send_delta(self, request: Request, follower: _Follower) -> None:
        text = ""
        if follower.detokenizer is not None:
            text = follower.detokenizer.take_delta(finished=request.is_finished)
            if not text and not request.is_finished:
                return  # nothing to show yet; its tokens come with the text
        tokens = request.token_ids[request.num_prompt_tokens + follower.num_streamed :]
        follower.num_streamed += len(tokens)
        follower.inbox.append(_output(request, text, tokens))

    def _whole_text(self, request: Request, detokenizer: IncrementalDetokenizer | None) -> str:
        params = request.sampling_params
        if detokenizer is not None:
            return detokenizer.text
        if self._tokenizer is None or not params.detokenize:
            return ""
        tokens = request.output_token_ids
        if _ended_by_token(request) and not params.include_stop_str_in_output:
            tokens = tokens[:-1]
        return self._tokenizer.decode_after(
            request.prompt_token_ids, tokens, skip_special_tokens=params.skip_special_tokens
        )


def _output(request: Request, text: str, token_ids: list[int]) -> RequestOutput:
    reason = request.status.value if request.is_finished else None
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[CompletionOutput(0, text, token_ids, finish_reason=reason, stop_reason=request.stop_reason)],
        finished=request.is_finished,
        metrics=request.metrics,
        num_cached_tokens=request.num_cached_tokens,
    )


def _ended_by_token(request: Request) -> bool:
    """Whether the last token is a stop or end-of-sequence token, which text leaves out."""
    return (
        request.status is RequestStatus.FINISHED_STOPPED
        and not isinstance(request.stop_reason, str)
        and request.num_output_tokens > 0
        and request.token_ids[-1] in request.ending_token_ids
    )
