"""One request on the host: known tokens, computed tokens, pages, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.cache.prefix_cache import CacheMatch
from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.guard import Guard, GuardState, Walk, WalkLimits
from jaxinfer.outputs import DenoisedBlock, Logprob, RequestMetrics
from jaxinfer.sampling.bounds import num_words, packed_bits
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.refusals import BREAKS_AT_FIRST, Excluded, Refusals
from jaxinfer.scheduling.request_status import Landed, RequestStatus
from jaxinfer.scheduling.scoring import Scoring, given_length
from jaxinfer.scheduling.token_marks import TokenMarks
from jaxinfer.scheduling.turning import turn_if_due
from jaxinfer.scheduling.version_runs import VersionRuns

if TYPE_CHECKING:
    from jaxinfer.constraints.automaton import TokenAutomaton
    from jaxinfer.constraints.block_walk import Block
    from jaxinfer.scheduling.group import Group


@dataclass(eq=False, slots=True)  # with slots, because hundreds of requests are visited in every step
class Request:
    """A prompt on its way to a completion. The scheduler lets `num_computed_tokens` catch up with `num_tokens`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_total_tokens: int  # prompt and output, from max_tokens and max_model_len; see `turning` for longrope
    eos_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    request_key: tuple[int, int] = (0, 0)  # two 32-bit words of randomness
    priority: int = 0
    arrival: int = 0  # order of arrival, unique in its engine

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_in_flight: int = 0  # the most tokens that launches in flight may land
    num_sure_in_flight: int = 0  # the fewest that they land, unless the sequence ends
    in_seat: bool = False  # its latest token is in its seat on the device, landed or not: no prompt chunk is left
    epoch: int = 0  # counts preemptions and restarts: results launched in an earlier epoch are dropped
    pages: list[int] = field(default_factory=list)
    num_borrowed_pages: int = 0  # the first of these, which its trunk holds and gives back
    cache_key: Hashable = None  # namespace of the prefix cache: equal tokens are shared only within one
    rope_length: int = 0  # the length that its rotation is for, if it matters, else 0; part of the cache's namespace
    later_total_tokens: int = 0  # longrope: `max_total_tokens` from the turn on; 0: it has turned, or never does
    prefix: CacheMatch | None = None  # the cached prefix it began with, and its lock on cached pages
    num_weights: int = 0  # changes of the weights before it began to run
    num_published_tokens: int = 0  # tokens whose pages are in the cache
    has_twin: bool = False  # another request has published the same tokens first: it publishes no more for now
    seat: int = -1  # row of the engine's host arrays while running
    stream: bool = False  # its tokens are wanted at every step
    group: Group[Request] | None = None  # the group whose output it is a part of; None: it is on its own
    branch: int = 0  # its number in the group
    trunk: Request | None = None  # computes the prefix that it shares with others of its group
    shares_lane: bool = False  # launches of rounds read its trunk once for all of its group
    logprobs_are_processed: bool = False  # those of drawn tokens: all of its tokens have to be drawn
    publishes: bool = True  # it shares pages through the prefix cache, in both directions
    is_steered: bool = False  # a search chooses after each token how it continues
    is_held: bool = False  # its latest token has landed, and the search has not chosen yet
    is_trunk: bool = False  # nothing is sampled after its last token
    is_computed: bool = False  # of a trunk: all of it is, at the latest by the launch that is being planned
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that its output must not contain
    constraint: TokenAutomaton[Any] | None = None  # automaton that its output follows
    drops_drawn: bool = False  # whether its epoch began because a drawn token was refused
    num_walking: int = 0  # launches whose tokens were read, and that are not walked yet
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    scoring: Scoring | None = None  # log probabilities of given tokens that it is asked for
    num_to_skip: int = 0  # output tokens that landed before a recovery, and that the device will land again
    num_handed_out: int = 0  # tokens of prompt and output that landings have handed out
    error: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))

    landed: Landed = field(init=False)
    token_ids: list[int] = field(init=False)  # prompt and output
    num_prompt_tokens: int = field(init=False)
    ending_token_ids: frozenset[int] = field(init=False)  # stop tokens, EOS if not ignored or by a grammar
    is_penalized: bool = field(init=False)  # its draws are, by the tokens of prompt and output
    is_bound_for_good: bool = field(init=False)  # its draws have bounds in its seat as long as it runs
    guard: Guard | None = field(init=False, default=None)  # what its output has to keep to
    # Whether it judges drawn tokens; those of a steered request are drawn, and chosen, within its masks.
    is_walked: bool = field(init=False)
    guard_state: GuardState | None = field(init=False, default=None)  # after the output tokens that have landed
    mask: np.ndarray | None = field(init=False, default=None)  # bits, of its next draw, if they are known
    # The guard's state before tokens that follow in any case and await their log probabilities; None: there are none.
    state_before_awaited: GuardState | None = field(init=False, default=None)
    guard_error: str | None = field(init=False, default=None)  # why its next mask is not known
    block: Block | None = field(init=False, default=None)  # with a guard: its block of a diffusion model, in its seat
    blocks: list[DenoisedBlock] = field(init=False, default_factory=list)  # after each round, if they are returned
    refusals: Refusals = field(init=False, default_factory=Refusals)
    marks: TokenMarks = field(init=False, default_factory=TokenMarks)  # of output tokens that were not simply drawn
    versions: VersionRuns = field(init=False, default_factory=VersionRuns)  # of the weights, by output token
    # Its next draw needs its latest token on the host: it takes part in one round of a launch, and drafts nothing.
    draws_alone: bool = field(init=False)
    _prompt_bits: np.ndarray | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = self.num_handed_out = len(self.token_ids)
        self.landed = Landed(self.num_prompt_tokens)
        params = self.sampling_params
        stop_ids = frozenset(params.stop_token_ids or ())
        has_eos = not params.ignore_eos or self.constraint is not None
        self.ending_token_ids = stop_ids | self.eos_token_ids if has_eos else stop_ids
        sequences = [sequence for sequence in self.bad_token_ids if len(sequence) > 1]
        if self.constraint is not None or sequences:
            excluded = Excluded(params.allowed_token_ids, self.bad_token_ids)
            self.guard = Guard(self.constraint, sequences, self.eos_token_ids, excluded)
            self.guard_state = self.guard.start
        self.is_walked = self.guard is not None and not self.is_steered
        if self.constraint is not None:
            self.refusals = Refusals(BREAKS_AT_FIRST)
        self.is_penalized = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.is_bound_for_good = (
            self.is_penalized or len(sequences) < len(self.bad_token_ids) or bool(params.logit_bias)
            or params.allowed_token_ids is not None or params.min_tokens > 0
        )  # fmt: skip
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # no token precedes the first one
        self._set_ways()

    def _set_ways(self) -> None:
        self.draws_alone = self.is_steered or self.refusals.are_frequent

    @property
    def has_begun(self) -> bool:
        """Whether it, or another one of its group, has run."""
        return self.metrics.first_scheduled_time is not None or (self.group is not None and self.group.has_begun)

    @property
    def has_masks(self) -> bool:
        """Whether all of its draws have masks, because too many would be refused without."""
        return self.guard is not None and (self.is_steered or self.refusals.are_frequent)

    @property
    def most_cached_tokens(self) -> int:
        """The most tokens that it begins with from the cache: it asks to compute the others, or what follows them."""
        params = self.sampling_params
        if params.skip_reading_prefix_cache or params.prompt_logprobs is not None:
            return 0
        return self.num_tokens if self.scoring is None else given_length(self.num_prompt_tokens, self.scoring) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def awaits_logprobs(self) -> bool:
        """Whether its last tokens, which follow in any case, land when their log probabilities are known."""
        return self.state_before_awaited is not None

    @property
    def num_landed_tokens(self) -> int:
        """Output tokens that are not awaited."""
        return self.landed.num_tokens - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens of prompt and output, and the most that may be in flight: what the device may know."""
        return min(len(self.token_ids) + self.num_in_flight, self.max_total_tokens)

    @property
    def num_tokens_left(self) -> int:
        """The most tokens that a further launch may still have to sample."""
        return self.max_total_tokens - len(self.token_ids) - self.num_sure_in_flight

    def leave_seat(self) -> None:
        """Leave the seat: tokens in flight will be dropped, and the device's state of the request is void."""
        self.num_in_flight = self.num_sure_in_flight = 0
        self.in_seat, self.block = False, None

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[dict[int, Logprob]] = (),
        error: str | None = None,
        walk: Walk | None = None,
    ) -> RequestStatus | None:
        """Land sampled tokens, up to the first that ends the request by the rules on tokens and length.

        The landing is prepared in the lists and committed by one assignment, to `landed`; all else follows from that.

        Args:
            logprobs: an entry for each token, if the request wants them.
            error: what failed after these tokens: the request ends with it, unless a token has ended it.
            walk: of a request with a guard, the walk that has kept these tokens.

        Returns:
            The finished status, if the request ends.
        """
        known = self.token_ids
        first, status, stop_reason = len(known), None, None
        if first + len(tokens) < self.max_total_tokens and self.ending_token_ids.isdisjoint(tokens):
            known += tokens  # nearly all tokens come this way
        else:
            for token in tokens:
                known.append(token)
                if token in self.ending_token_ids and self.num_output_tokens > self.sampling_params.min_tokens:
                    if token not in self.eos_token_ids or (self.sampling_params.ignore_eos and self.guard is None):
                        stop_reason = token
                    status = RequestStatus.FINISHED_STOPPED
                    break
                if len(known) >= self.max_total_tokens:
                    status = None if self.later_total_tokens else RequestStatus.FINISHED_LENGTH
                    break
        if logprobs:
            self.logprobs += logprobs[: len(known) - first]
        if walk is not None:
            self.guard_state, self.mask, self.state_before_awaited = walk.state, walk.mask, None
            if walk.is_complete and status is not RequestStatus.FINISHED_STOPPED:
                status = RequestStatus.FINISHED_STOPPED  # also at its greatest length: its text is whole
        if status is None and error is not None:
            status = RequestStatus.FINISHED_ERROR
        else:
            error = None
        self.landed = Landed(len(known), len(self.logprobs), status, stop_reason, error)
        if status is not None:
            self.status, self.stop_reason, self.error = status, stop_reason, error
        if self.is_steered:
            self.is_held, self.in_seat = True, False
        return status

    def finish(
        self,
        status: RequestStatus,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """End the request with a finished status, at once.

        Args:
            num_output_tokens: how many output tokens it keeps; None: all.
        """
        self.drop_awaited()
        num_tokens = self.landed.num_tokens
        num_logprobs = self.landed.num_logprobs
        if num_output_tokens is not None:
            num_tokens = self.num_prompt_tokens + num_output_tokens
            num_logprobs = num_logprobs if self.is_steered else min(num_logprobs, num_output_tokens)
        self.landed = Landed(num_tokens, num_logprobs, status, stop_reason, error)
        self.settle()

    def settle(self) -> None:
        """Bring lists and status in line with `landed`; for a request that no step is changing."""
        landed = self.landed
        if not self.awaits_logprobs:
            del self.token_ids[landed.num_tokens :]
            del self.logprobs[landed.num_logprobs :]
        if landed.status is not None:
            self.status, self.stop_reason, self.error = landed.status, landed.stop_reason, landed.error

    def await_logprobs(self, tokens: Sequence[int], state: GuardState) -> None:
        """Have tokens computed that follow in any case. They land, with their log probabilities, when the token after
        them lands.

        Args:
            state: the guard's, before these tokens.
        """
        self.state_before_awaited = state
        self.token_ids += tokens

    def drop_awaited(self) -> None:
        """Forget tokens whose log probabilities are awaited."""
        if self.state_before_awaited is not None:
            self.guard_state, self.mask, self.state_before_awaited = self.state_before_awaited, None, None
            self.settle()
            self.marks.cut(self.num_output_tokens)

    def reenter(self, *, is_refused: bool) -> None:
        """Continue from tokens that are not those that were drawn: what is in flight is dropped when it lands, and the
        seat is entered anew.

        Args:
            is_refused: whether a token was drawn after those that it continues from.
        """
        self.epoch += 1
        self.drops_drawn = is_refused
        self.leave_seat()

    def note_refusals(self, num_kept: int, *, is_refused: bool, is_forced: bool = False) -> None:
        """Note drawn tokens that its guard has allowed, and whether it has refused or forced the next one."""
        self.refusals.note(num_kept, is_refused=is_refused, is_forced=is_forced)
        self._set_ways()

    def walk_limits(self, vocab: int) -> WalkLimits:
        """Return the limits of a walk along tokens that follow those that have landed."""
        params = self.sampling_params
        return WalkLimits(
            vocab, self.ending_token_ids, self.num_output_tokens, params.min_tokens,
            self.max_total_tokens - self.num_prompt_tokens, self.num_in_flight,
            forces_ends=params.logprobs is None, wants_mask=self.has_masks,
            forces=params.logprobs is None or not self.logprobs_are_processed,
        )  # fmt: skip

    def start_over(self) -> None:
        """Keep what has landed, and drop all that follows from it: pages, seat, what is computed or in flight."""
        self.state_before_awaited = self.mask = None
        self.settle()
        self.marks.cut(self.num_output_tokens)
        if self.guard is not None and not self.is_finished:
            try:  # a search has not chosen the last token of a held one yet
                self.guard_state = self.guard.along(self.output_token_ids[: -1 if self.is_held else None])
            except ConstraintError as error:
                self.finish(RequestStatus.FINISHED_ERROR, error=str(error))
        turn_if_due(self)
        self.epoch += 1
        self.num_walking = 0
        self.num_computed_tokens = self.num_published_tokens = self.num_borrowed_pages = self.num_to_skip = 0
        self.pages, self.prefix = [], None
        self.has_twin = self.is_computed = False
        self.seat = -1
        self.leave_seat()
        if not self.is_finished:
            has_run = self.metrics.first_scheduled_time is not None
            self.status = RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING

    def begin_with(self, tokens: Sequence[int]) -> None:
        """Begin with output tokens that were chosen for the request, none of which is sampled or handed out.

        The state of its guard is to be set by `continue_guard_of`, or follows from the tokens.
        """
        self.token_ids[self.num_prompt_tokens :] = tokens
        self.landed = Landed(len(self.token_ids), len(self.logprobs))
        self.num_handed_out = max(self.num_handed_out, len(self.token_ids))
        self.is_held = False

    def steer(self, token: int) -> None:
        """Continue with `token` in place of the one that was sampled last, which no step has computed yet."""
        self.token_ids[-1] = token
        self.is_held = False
        self._advance_guard(token)

    def continue_guard_of(self, parent: Request) -> None:
        """Take over the state of a request that has the same tokens but the last, which a search has not chosen yet."""
        self.guard_state = parent.guard_state
        self._advance_guard(self.token_ids[-1])

    def _advance_guard(self, token: int) -> None:
        """Let the guard of a steered request follow a token that was chosen: draws do not move it."""
        if self.guard is not None and self.guard_state is not None:
            self.guard_state, self.mask = self.guard.advance(self.guard_state, token), None
            assert self.guard_state is not None, "a search chooses among tokens that are allowed"

    def base_set(self, vocab: int) -> np.ndarray:
        """bool [vocab]: the tokens that may ever be drawn."""
        return ~Excluded(self.sampling_params.allowed_token_ids, self.bad_token_ids).members(vocab)

    def next_mask(self, vocab: int) -> np.ndarray | None:
        """Return the tokens that its guard allows after those that have landed, as bits; None: any token."""
        if self.guard is None or self.guard_state is None:
            return None
        if self.mask is None:
            try:
                self.mask = self.guard.mask(self.guard_state, vocab)
            except ConstraintError as error:
                # With an empty mask nothing can be drawn, which ends the request.
                self.guard_error, self.mask = str(error), np.zeros(num_words(vocab), np.uint32)
        return self.mask

    def prompt_bits(self, vocab: int) -> np.ndarray:
        """The set of the prompt's tokens as bits, see `packed_bits`; computed once."""
        if self._prompt_bits is None:
            mask = np.zeros(vocab, bool)
            mask[self.prompt_token_ids] = True
            self._prompt_bits = packed_bits(mask)
        return self._prompt_bits
