"""From tokens that land to what a user sees: text, stop strings, deltas or whole outputs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.detokenizer import IncrementalDetokenizer
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.request_group import RequestGroup
from jaxinfer.engine.scheduler import Landing
from jaxinfer.outputs import CompletionOutput, Logprob, RequestOutput
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class _Follower:
    """What is kept of one request until its last output."""

    inbox: deque[RequestOutput]
    stream: bool
    detokenizer: IncrementalDetokenizer | None
    stepwise: bool  # whether something is made of its tokens before the end
    group: _GroupFollower | None = None
    index: int = 0  # of its output in the group's
    num_streamed: int = 0  # output tokens that earlier deltas held
    failed: bool = False


@dataclass
class _GroupFollower:
    """What is kept of a group: one output is made of those of its members."""

    group: RequestGroup
    outputs: list[CompletionOutput | None]  # of members that are finished
    unfinished: int
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


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
        self._followers[request.request_id] = _Follower(
            inbox, stream, detokenizer, stepwise=stream or detokenizer is not None
        )

    def follow_group(self, group: RequestGroup, inbox: deque[RequestOutput], *, stream: bool) -> None:
        """Send `inbox` one output of all members when the last of them is finished; with `stream`, what is new of each
        as it comes."""
        count = len(group.members)
        of_group = _GroupFollower(group, [None] * count, count)
        for index, member in enumerate(group.members):
            self.follow(member, inbox, stream=stream)
            follower = self._followers[member.request_id]
            follower.group, follower.index = of_group, index

    def process(self, landings: Sequence[Landing]) -> None:
        """Take the tokens of one step. What goes wrong with one request ends that request and no other."""
        for landing in landings:
            request = landing.request
            follower = self._followers.get(request.request_id)
            if follower is None:
                continue  # added to the engine by someone who reads its tokens himself
            if not (follower.stepwise or request.is_finished):
                continue
            try:
                self._take(landing, follower)
                if not request.is_finished and follower.stream:
                    self._send_delta(request, follower)
            except Exception as error:
                self._fail(request, follower, error)
            if request.is_finished:
                self.close(request)

    def _fail(self, request: Request, follower: _Follower, error: Exception) -> None:
        logger.error("request %s failed on the host", request.request_id, exc_info=error)
        if not request.is_finished:
            self._core.finish(request, RequestStatus.FINISHED_ERROR)
        request.status = RequestStatus.FINISHED_ERROR
        request.error = f"{type(error).__name__}: {error}"
        follower.failed = True  # what made its text cannot be asked again

    def close(self, request: Request) -> None:
        """Send the last output of a finished request and forget it."""
        follower = self._followers.pop(request.request_id)
        text = ""
        try:
            if not follower.failed:
                text = self._last_text(request, follower)
        except Exception as error:
            self._fail(request, follower, error)
        self._send(request, follower, text, follower.num_streamed)

    def _take(self, landing: Landing, follower: _Follower) -> None:
        """Make text of landed tokens, and cut text and tokens at the stop string that is completed first."""
        request, detokenizer = landing.request, follower.detokenizer
        if detokenizer is None:
            return
        matched = None
        for index in range(landing.first, landing.last):
            is_stop_token = index == landing.last - 1 and _ended_by_token(request)
            if not is_stop_token or request.sampling_params.include_stop_str_in_output:
                matched = detokenizer.append(request.token_ids[index])
            if matched is not None:
                request.truncate_output(index + 1 - request.num_prompt_tokens)
                break
        if matched is None and request.is_finished:
            matched = detokenizer.finish()
        if matched is not None:
            if not request.is_finished:
                self._core.finish(request, RequestStatus.FINISHED_STOPPED)
            # It came before whatever else ended the request: a later token, or its length.
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = matched

    def _send_delta(self, request: Request, follower: _Follower) -> None:
        text = ""
        if follower.detokenizer is not None:
            text = follower.detokenizer.take_delta(finished=False)
            if not text:
                return  # nothing to show yet; its tokens come with the text
        first, follower.num_streamed = follower.num_streamed, request.num_output_tokens
        self._send(request, follower, text, first)

    def _send(self, request: Request, follower: _Follower, text: str, first: int) -> None:
        output = self._output(request, text, first)
        if follower.group is not None:
            output = _output_of_group(follower.group, follower.index, output, stream=follower.stream)
        if output is not None:
            follower.inbox.append(output)

    def _last_text(self, request: Request, follower: _Follower) -> str:
        """What is left of a stream's text, or the whole text of what is not streamed."""
        params, detokenizer = request.sampling_params, follower.detokenizer
        if detokenizer is not None:
            detokenizer.finish()  # an abort may leave a character incomplete
            return detokenizer.take_delta(finished=True)
        if self._tokenizer is None or not params.detokenize:
            return ""
        tokens = request.output_token_ids
        if _ended_by_token(request) and not params.include_stop_str_in_output:
            tokens = tokens[:-1]
        return self._tokenizer.decode_after(
            request.prompt_token_ids, tokens, skip_special_tokens=params.skip_special_tokens
        )

    def _output(self, request: Request, text: str, first: int) -> RequestOutput:
        """An output with the tokens (and log probabilities) from output token `first` on."""
        params = request.sampling_params
        logprobs = cumulative = None
        if params.logprobs is not None:
            logprobs = [self._decoded(entry) for entry in request.logprobs[first:]]
            # A position's first entry is the token that was chosen.
            cumulative = sum(next(iter(entry.values())).logprob for entry in request.logprobs)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None if entry is None else self._decoded(entry) for entry in request.prompt_logprobs]
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=request.token_ids[request.num_prompt_tokens + first :],
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=request.status.value if request.is_finished else None,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=request.is_finished,
            prompt_logprobs=prompt_logprobs,
            metrics=request.metrics,
            num_cached_tokens=request.num_cached_tokens,
            error=request.error,
        )

    def _decoded(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return entry
        decode = self._tokenizer.decode
        return {
            token: replace(logprob, decoded_token=decode([token], skip_special_tokens=False))
            for token, logprob in entry.items()
        }


def _output_of_group(
    of_group: _GroupFollower, index: int, output: RequestOutput, *, stream: bool
) -> RequestOutput | None:
    """What is sent of a group when `output` came of its member `index`; None: nothing yet."""
    group, [completion] = of_group.group, output.outputs
    completion.index = index
    if output.finished:
        of_group.unfinished -= 1
        of_group.outputs[index] = completion
        of_group.num_cached_tokens = max(of_group.num_cached_tokens, output.num_cached_tokens)
        of_group.error = of_group.error or output.error
        of_group.prompt_logprobs = of_group.prompt_logprobs or output.prompt_logprobs
    finished = of_group.unfinished == 0
    if not (stream or finished):
        return None
    return RequestOutput(
        request_id=group.request_id,
        prompt=group.prompt,
        prompt_token_ids=group.prompt_token_ids,
        outputs=[completion] if stream else [of for of in of_group.outputs if of is not None],
        finished=finished,
        prompt_logprobs=of_group.prompt_logprobs,
        metrics=group.metrics() if finished else output.metrics,
        num_cached_tokens=of_group.num_cached_tokens,
        error=of_group.error,
    )


def _ended_by_token(request: Request) -> bool:
    """Whether the last token is a stop or end-of-sequence token, which text leaves out."""
    return request.status is RequestStatus.FINISHED_STOPPED and request.token_ids[-1] in request.ending_token_ids
