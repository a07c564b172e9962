"""Blocks of constrained requests of block-diffusion models, which the host commits: their beginning and landing."""

from __future__ import annotations

from jaxinfer.constraints.block_walk import Block, BlockLimits, BlockWalk, begin_block
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import ConstrainedRounds


def block_limits(request: Request, rounds: ConstrainedRounds, vocab: int) -> BlockLimits:
    """Return the limits of the blocks of a request."""
    return BlockLimits(
        rounds.block_size, vocab, rounds.mask_token_id, request.ending_token_ids, request.max_total_tokens
    )


def block_of(request: Request, rounds: ConstrainedRounds, vocab: int) -> Block:
    """Return the block at which a seated request with a guard is; begin it after the tokens that have landed if the
    request is at none.

    It begins in this thread, unlike blocks that follow others: only one mask is found, mostly the grammar's first,
    which is known since the grammar was compiled.
    """
    if request.block is None:
        assert request.guard is not None and request.guard_state is not None
        assert request.sampling_params.logprobs is None, "tokens that are not drawn have no log probabilities"
        start = request.num_tokens // rounds.block_size * rounds.block_size
        given = request.token_ids[start:]
        limits = block_limits(request, rounds, vocab)
        request.block = begin_block(request.guard, request.guard_state, start, given, limits)
    return request.block


def land_block(request: Request, walk: BlockWalk) -> None:
    """Land the tokens of a walk, and let the request continue with the next round or the next block."""
    marks, block, num_prompt = request.marks, request.block, request.num_prompt_tokens
    if walk.was_redrawn and walk.num_kept and block is not None:  # the token of the leftmost masked place
        marks.redrawn_at.append(block.start + len(block.tokens) - num_prompt)
    if walk.lands:
        marks.forced_at += [position - num_prompt for position in walk.forced_at]
        request.num_computed_tokens = walk.num_computed
        request.extend(walk.tokens, error=walk.error, walk=walk)
    request.block = walk.block
