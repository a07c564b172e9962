"""Output processing: text, stop strings, and deltas or whole outputs from tokens that land.

Stop strings are searched for as tokens land, within the step. An output is made when its reader takes it, as the
difference between what has landed and what was sent before. So none is lost or repeated when a step is interrupted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from jaxinfer.frontend.detokenizer import IncrementalDetokenizer
from jaxinfer.outputs import CompletionOutput, EngineFailure, Logprob, RequestOutput
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.scheduler_output import Landing
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Ends after which an incomplete last character is decoded, which may complete a stop string.
_OWN_ENDS = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)


class Core(Protocol):
    """The part of `EngineCore` that output processing uses."""

    def finish(
        self,
        request: Request,
        status: RequestStatus,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        num_output_tokens: int | None = None,
    ) -> None: ...


class _Sent(NamedTuple):
    """State of a request's reader: what was sent to it."""

    num_tokens: int = 0  # output tokens
    num_characters: int = 0
    is_final: bool = False  # the last output, too
    logprob: float = 0.0  # sum over these tokens, where log probabilities are wanted
    has_prompt: bool = False  # prompt log probabilities, which are sent once
    num_blocks: int = 0  # rounds of denoising


@dataclass(eq=False)
class _Follower:
    """State of one request until its last output."""

    request: Request
    inbox: Inbox
    stream: bool
    makes_text: bool  # as tokens land, for a stream or to find stop strings
    detokenizer: IncrementalDetokenizer | None = None  # None: to be rebuilt from all tokens
    sent: _Sent = _Sent()
    failed: str | None = None  # the detokenisation error that has ended the request
    group: _GroupFollower | None = None


@dataclass(eq=False)
class _GroupFollower:
    """State of a group, whose members' outputs are joined to one output."""

    group: RequestGroup
    members: list[_Follower] = field(default_factory=list)


class Inbox:
    """The outputs of one reader. Those that it has not taken yet are merged per request."""

    def __init__(self, output_of: Callable[[_Follower], tuple[RequestOutput | None, _Sent]]) -> None:
        self._output_of = output_of
        self._news: dict[_Follower, None] = {}
        self._taken: list[tuple[_Follower, RequestOutput | None, _Sent]] = []  # by a `take` that has not returned

    def tell(self, follower: _Follower) -> None:
        """Note that a request may have new output."""
        self._news[follower] = None

    def take(self) -> list[RequestOutput]:
        """Return the new output of each request since the last call that returned."""
        for follower, _, sent in self._taken:
            follower.sent = sent
        for follower in list(self._news):
            output, sent = self._output_of(follower)
            self._taken.append((follower, output, sent))
            follower.sent = sent
            self._news.pop(follower, None)
        outputs = [output for _, output, _ in self._taken if output is not None]
        # One expression: an interruption between two statements would lose the outputs.
        return self._taken.clear() or outputs


class OutputProcessor:
    """Processor that turns landed tokens into outputs for the readers of requests."""

    def __init__(self, core: Core, tokenizer: Tokenizer | None) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._followers: dict[str, _Follower] = {}

    @property
    def has_followers(self) -> bool:
        """Whether a request's last output has not landed yet."""
        return bool(self._followers)

    def inbox(self) -> Inbox:
        """Return an inbox for a new reader."""
        return Inbox(self._output_of)

    def follow(self, request: Request, inbox: Inbox, *, stream: bool) -> None:
        """Send the request's output to `inbox` when it is finished or, with `stream`, new output after every step.

        Without stop strings or streaming, text is decoded only at the end.
        """
        params = request.sampling_params
        makes_text = self._tokenizer is not None and params.detokenize and (stream or bool(params.stop_strings))
        self._followers[request.request_id] = _Follower(request, inbox, stream, makes_text)

    def follow_group(self, group: RequestGroup, inbox: Inbox, *, stream: bool) -> None:
        """Send one output of all members to `inbox` when the last is finished; with `stream`, new output of each."""
        group_follower = _GroupFollower(group)
        for member in group.members:
            self.follow(member, inbox, stream=stream)
            follower = self._followers[member.request_id]
            follower.group = group_follower
            group_follower.members.append(follower)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Stop following requests that were never queued."""
        for request_id in request_ids:
            self._followers.pop(request_id, None)

    def process(self, landings: Sequence[Landing]) -> None:
        """Take the tokens of one step. An error in one request ends that request and no other.

        The same landing may be given again.
        """
        for request, _, _ in landings:
            follower = self._followers.get(request.request_id)
            if follower is None or follower.request is not request:
                continue  # a caller that added it to the core reads its tokens itself
            if follower.makes_text and follower.failed is None:
                self._twice(self._read, follower)
                if follower.failed is not None:
                    self._core.finish(request, RequestStatus.FINISHED_ERROR, error=follower.failed)
            if follower.stream or request.is_finished:
                follower.inbox.tell(follower)
            if request.is_finished:
                del self._followers[request.request_id]

    def _twice[T](self, make: Callable[[_Follower], T], follower: _Follower) -> T | None:
        """Call `make`, and if it fails, once more with a new detokenizer. If that fails too, set `follower.failed`."""
        for attempt in (1, 2):
            try:
                return make(follower)
            except Exception as error:
                name = follower.request.request_id
                logger.error("no text could be made of request %s, attempt %d of 2", name, attempt, exc_info=error)
                follower.detokenizer = None
                failed = EngineFailure(f"{type(error).__name__}: {error}")
        follower.failed = failed
        return None

    def _read(self, follower: _Follower) -> None:
        """Decode landed tokens, and cut text and tokens at the first stop string."""
        request, detokenizer = follower.request, follower.detokenizer
        follower.detokenizer = None  # an interruption below must not leave a half-updated one
        if detokenizer is None:
            detokenizer = self._new_detokenizer(request)
        matched, kept = None, None
        for index in range(detokenizer.num_tokens, request.num_landed_tokens):
            if not _is_hidden(request, index):
                matched = detokenizer.append(request.token_ids[request.num_prompt_tokens + index])
            if matched is not None:
                kept = index + 1
                break
        if matched is None and request.status in _OWN_ENDS:
            matched = detokenizer.finish()
        if matched is not None:
            # The stop string precedes any other end of the request: a later token, or its length.
            self._core.finish(request, RequestStatus.FINISHED_STOPPED, stop_reason=matched, num_output_tokens=kept)
        follower.detokenizer = detokenizer

    def _new_detokenizer(self, request: Request) -> IncrementalDetokenizer:
        assert self._tokenizer is not None
        return IncrementalDetokenizer(self._tokenizer, request.prompt_token_ids, request.sampling_params)

    def _output_of(self, follower: _Follower) -> tuple[RequestOutput | None, _Sent]:
        """Return the new output of a request or None, and what its reader was sent with it."""
        request, sent, group_follower = follower.request, follower.sent, follower.group
        if sent.is_final or not (request.is_finished or follower.stream):
            return None, sent
        if group_follower is not None and not follower.stream:
            if not all([member.request.is_finished for member in group_follower.members]):
                return None, sent
            outputs = [self._new_of(member)[0] for member in group_follower.members]
            whole = [output for output in outputs if output is not None]
            for member in group_follower.members:
                if member is not follower:
                    member.sent = _Sent(is_final=True)
            return _group_output(group_follower, whole, finished=True), _Sent(is_final=True)
        output, now = self._new_of(follower)
        if output is not None and group_follower is not None:
            others = [member for member in group_follower.members if member is not follower]
            finished = output.finished and all([member.sent.is_final for member in others])
            output = _group_output(group_follower, [output], finished=finished)
        return output, now

    def _new_of(self, follower: _Follower) -> tuple[RequestOutput | None, _Sent]:
        """Return a request's own new output: its rest if it is finished, else what can be shown of a stream."""
        request, sent = follower.request, follower.sent
        request.settle()
        num_tokens, is_final = request.num_landed_tokens, request.is_finished
        text, num_characters = "", sent.num_characters
        if is_final:
            if follower.failed is None:
                text = self._twice(self._last_text, follower) or ""
            if follower.failed is not None:
                request.finish(RequestStatus.FINISHED_ERROR, error=follower.failed)
        elif follower.makes_text:
            if follower.detokenizer is None:
                return None, sent  # a step was interrupted: the next one rebuilds it
            text = follower.detokenizer.shown(num_characters)
            if not text:
                return None, sent  # nothing to show yet; its tokens come with the text
            num_tokens = min(num_tokens, follower.detokenizer.num_tokens)
        elif num_tokens == sent.num_tokens:
            return None, sent
        output = self._output(request, text, sent, num_tokens)
        logprob = output.outputs[0].cumulative_logprob or 0.0
        num_blocks = sent.num_blocks + len(output.outputs[0].blocks or ())
        now = _Sent(num_tokens, num_characters + len(text), is_final, logprob, has_prompt=True, num_blocks=num_blocks)
        return output, now

    def _last_text(self, follower: _Follower) -> str:
        """Return the rest of the text that is decoded as it lands, or the whole text of another request."""
        request, params = follower.request, follower.request.sampling_params
        if follower.makes_text:
            detokenizer = follower.detokenizer
            if detokenizer is None:
                detokenizer = self._new_detokenizer(request)
                for index in range(request.num_output_tokens):
                    if not _is_hidden(request, index):
                        detokenizer.append(request.output_token_ids[index])
            detokenizer.finish()  # an abort may leave a character incomplete
            return detokenizer.text[follower.sent.num_characters :]
        if self._tokenizer is None or not params.detokenize:
            return ""
        tokens = request.output_token_ids
        if tokens and _is_hidden(request, len(tokens) - 1):
            tokens = tokens[:-1]
        return self._tokenizer.decode_after(
            request.prompt_token_ids, tokens, skip_special_tokens=params.skip_special_tokens
        )

    def _output(self, request: Request, text: str, sent: _Sent, last: int) -> RequestOutput:
        """Return an output with the unsent output tokens up to `last` and their log probabilities."""
        params, first = request.sampling_params, sent.num_tokens
        logprobs = cumulative = None
        if params.logprobs is not None:
            logprobs = [self._decoded(entry) for entry in request.logprobs[first:last]]
            # A position's first entry is the sampled token.
            cumulative = sum([next(iter(entry.values())).logprob for entry in logprobs], sent.logprob)
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not sent.has_prompt:
            prompt_logprobs = [None if entry is None else self._decoded(entry) for entry in request.prompt_logprobs]
        start = request.num_prompt_tokens
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=request.token_ids[start + first : start + last],
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            token_sources=request.marks.sources(first, last) if params.return_token_sources else None,
            blocks=request.blocks[sent.num_blocks :] if params.return_blocks else None,
            finish_reason=request.status.value if request.is_finished else None,
            stop_reason=request.stop_reason,
            weights_versions=request.versions.runs(first, last),
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


def _group_output(group_follower: _GroupFollower, outputs: Sequence[RequestOutput], *, finished: bool) -> RequestOutput:
    """Join outputs of members of a group to one output."""
    group, followers = group_follower.group, group_follower.members
    index_of = {follower.request.request_id: index for index, follower in enumerate(followers)}
    completions = []
    for output in outputs:
        [completion] = output.outputs
        completion.index = index_of[output.request_id]
        completions.append(completion)
    ended = [follower.request for follower in followers if follower.request.is_finished]
    return RequestOutput(
        request_id=group.request_id,
        prompt=group.prompt,
        prompt_token_ids=group.prompt_token_ids,
        outputs=completions,
        finished=finished,
        prompt_logprobs=next((output.prompt_logprobs for output in outputs if output.prompt_logprobs), None),
        metrics=group.metrics() if finished else outputs[0].metrics,
        num_cached_tokens=max([request.num_cached_tokens for request in ended], default=0),
        error=next((request.error for request in ended if request.error is not None), None),
    )


def _is_hidden(request: Request, index: int) -> bool:
    """Whether an output token has ended the request and is left out of the text."""
    return (
        index == request.num_output_tokens - 1
        and request.status is RequestStatus.FINISHED_STOPPED
        and request.token_ids[-1] in request.ending_token_ids
        and not request.sampling_params.include_stop_str_in_output
    )
