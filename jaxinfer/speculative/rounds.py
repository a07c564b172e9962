"""Rounds of speculation in one launch, for seated rows: draft, verify, accept, and update the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import StepBatch, idle_batch, unpack
from jaxinfer.programs.commit_tail import commit_tail
from jaxinfer.programs.forward import forward_with_features
from jaxinfer.programs.program import BOUNDS, KV, SEATS, TARGET, Device, Place
from jaxinfer.programs.seats import Seats, latest_tokens
from jaxinfer.programs.wide_rows import put_tokens, sampled_everywhere, wide_rows
from jaxinfer.sampling.bounds import Bounded, Bounds, counted
from jaxinfer.sampling.logprobs import Noted, TokenLogprobs
from jaxinfer.sampling.next_tokens import noted_tokens, redrawn, within_masks
from jaxinfer.sampling.noted import Draws, Noting, logits_after
from jaxinfer.speculative.accept import land, num_accepted
from jaxinfer.speculative.proposer import Drafts, Proposer, RoundsShape, Seated
from jaxinfer.speculative.tails import TailPages, num_words, positions_of_tails, tokens_of_sequences, with_tail
from jaxinfer.speculative.tree import Tree, accepted_path, ancestor_bits, no_tree, paths


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundsOutput:
    """Output of N rounds of R rows. At most W tokens land for a row in a round."""

    tokens: jax.Array  # int32 [N * W, R], landed tokens of each row in order; -1: none, NO_SCORE: the row ends here
    num_drafts: jax.Array  # int32 [N, R], drafts along a path (for a tree, its depth)
    num_accepted: jax.Array  # int32 [N, R], accepted drafts
    entropy: jax.Array  # float32 [N, R], nats, see `Drafts`
    was_redrawn: jax.Array  # bool [R], first tokens that are not those of a draw without a mask
    logprobs: TokenLogprobs  # [N * W, R], of landed tokens, where the batch wants them; else zeros
    tree: Tree | None  # of each row's last round, where trees are drafted


type _Carried = tuple[dict[str, Any], RoundsOutput]


class Verified(NamedTuple):
    """Result of a verification for R rows: for the latest token and W - 1 drafts along a path."""

    kv: KVPool
    sampled: jax.Array  # int32 [R, W], after each
    features: jax.Array | None  # [R, W, F * hidden]
    accepted: jax.Array  # int32 [R], number of accepted drafts
    was_redrawn: jax.Array  # bool [R], whether the first sampled token is not that of a draw without a mask
    noted: Noted  # [R, W], of the sampled tokens
    drawn: Callable[[], Draws]  # the draws [R * W] of these


@dataclass(frozen=True, eq=False)
class SpeculativeRounds:
    """Program of up to `max_rounds` rounds. Its input is a packed batch of seated rows: `num_steps` is the number of
    rounds that a row takes part in, and `max_drafts` the most drafts for it in a round."""

    proposer: Proposer
    max_rounds: int
    shapes: Sequence[RoundsShape] = ()
    tails: TailPages | None = None  # where trees are stored
    processed: bool = False  # log probabilities, see `Noting`

    @property
    def reads(self) -> Sequence[str]:
        return (TARGET, *self.proposer.reads)

    @property
    def writes(self) -> Sequence[str]:
        return (KV, SEATS, BOUNDS, *self.proposer.writes)

    @property
    def planned(self) -> dict[str, RoundsShape]:
        rows = [shape for shape in self.shapes if not shape.batch.lane_pages]
        lanes = [shape for shape in self.shapes if shape.batch.lane_pages]
        return {
            name: max(shapes, key=lambda s: (s.batch.num_rows * s.verified, s.batch.pages_per_row))
            for name, shapes in (
                ("speculative_rounds", [shape for shape in rows if not shape.num_nodes]),
                ("tree_rounds", [shape for shape in rows if shape.num_nodes]),
                ("branch_rounds", [shape for shape in lanes if not shape.num_nodes]),
                ("branch_tree_rounds", [shape for shape in lanes if shape.num_nodes]),
            )
            if shapes
        }

    def describe(self, shape: RoundsShape) -> str:
        drafts = f"trees of {shape.num_nodes} drafts" if shape.num_nodes else f"{shape.width - 1} drafts"
        return f"rounds of speculation for {shape.batch.describe()}, {drafts}"

    def idle(self, shape: RoundsShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape.batch, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def run(self, device: Device, shape: RoundsShape, buffer: jax.Array) -> tuple[dict[str, Any], RoundsOutput]:
        batch, width = unpack(buffer, shape.batch), shape.width
        rows = shape.batch.num_rows
        vocab = device.models[TARGET].config.vocab_size

        def turn(index: jax.Array, carried: _Carried) -> _Carried:
            state, output = carried
            now = replace(device, state=state)
            seated = _seated(batch, state[SEATS], index < batch.num_steps, width)
            changed, drafts = self.proposer.propose(now, seated, shape)
            state, bounds = {**state, **changed}, state[BOUNDS]
            state.pop(BOUNDS)  # no branch of the switch changes them, so none carries them

            def verify(state: dict[str, Any], *, width: int = width) -> tuple[dict[str, Any], tuple[Any, ...]]:
                now = replace(device, state={**state, BOUNDS: bounds})
                found = self._verified(now, state[KV], seated, drafts, width)
                seats, landed = land(
                    state[SEATS], batch.row_seat, seated.token, seated.length, seated.runs,
                    found.sampled, found.accepted,
                    ending_token_ids=batch.samples.ending_token_ids, max_len=batch.samples.max_len,
                )  # fmt: skip
                state = {**state, KV: found.kv, SEATS: seats}
                # All branches of the switch return the same shapes.
                wide = (0, shape.width - width)
                logprobs = self._logprobs(now, seated, found, landed)
                logprobs = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), wide, *((0, 0),) * (x.ndim - 2))), logprobs)
                landed = jnp.pad(landed, ((0, 0), wide), constant_values=-1)
                state |= self.proposer.settle(replace(device, state=state), seated, landed, found.features)
                return state, (landed, found.accepted, output.was_redrawn | found.was_redrawn, logprobs)

            def rest(state: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
                nothing = jnp.full((rows, width), -1, jnp.int32)
                return state, (
                    nothing, jnp.zeros(rows, jnp.int32), output.was_redrawn,
                    TokenLogprobs.nothing(rows, width, vocab=vocab),
                )  # fmt: skip

            ways = [rest, verify]
            runs = jnp.any(seated.runs)
            way = runs.astype(jnp.int32)
            if self.proposer.may_find_nothing:
                ways.insert(1, partial(verify, width=1))
                way += way * jnp.any(drafts.count > 0)
            state, (landed, accepted, was_redrawn, logprobs) = lax.switch(way, ways, state)
            state = {**state, BOUNDS: _counted(bounds, seated, landed)}

            def noted(all_rounds: jax.Array, this_round: jax.Array) -> jax.Array:
                return lax.dynamic_update_index_in_dim(all_rounds, this_round, index, axis=0)

            of_tokens = partial(put_tokens, index=index)
            tree = output.tree
            if tree is not None:
                tree = jax.tree.map(lambda new, old: _of_rows(seated.runs, new, old), drafts, tree)
            return state, RoundsOutput(
                tokens=of_tokens(output.tokens, landed),
                num_drafts=noted(output.num_drafts, drafts.count),
                num_accepted=noted(output.num_accepted, accepted),
                entropy=noted(output.entropy, drafts.entropy),
                was_redrawn=was_redrawn,
                logprobs=jax.tree.map(of_tokens, output.logprobs, logprobs),
                tree=tree,
            )

        counts = jnp.zeros((self.max_rounds, rows), jnp.int32)
        output = RoundsOutput(
            tokens=jnp.full((self.max_rounds * width, rows), -1, jnp.int32),
            num_drafts=counts,
            num_accepted=counts,
            entropy=counts.astype(jnp.float32),
            was_redrawn=jnp.zeros(rows, bool),
            logprobs=TokenLogprobs.nothing(self.max_rounds * width, rows, vocab=vocab),
            tree=no_tree(rows, shape.num_nodes) if shape.num_nodes else None,
        )
        state, output = lax.fori_loop(0, self.max_rounds, turn, (dict(device.state), output))
        return {**state, BOUNDS: device.placed(state[BOUNDS])}, device.readable(output)

    def _verified(self, device: Device, kv: KVPool, seated: Seated, drafts: Drafts | Tree, width: int) -> Verified:
        if not isinstance(drafts, Drafts):
            return self._verified_tree(device, kv, seated, drafts, width)
        return self._verified_chain(device, kv, seated, replace(drafts, tokens=drafts.tokens[:, : width - 1]))

    def _verified_chain(self, device: Device, kv: KVPool, seated: Seated, drafts: Drafts) -> Verified:
        """Verify each row's latest token and its drafts, in the slots where accepted drafts stay."""
        tokens = jnp.concatenate([seated.token[:, None], drafts.tokens], axis=1)
        latest = seated.latest_output(device.state[BOUNDS])
        wide = wide_rows(
            seated.batch, tokens, seated.length - 1, jnp.where(seated.runs, drafts.count + 1, 0),
            page_size=kv.page_size, num_slots=kv.num_slots,
        )  # fmt: skip
        # The path before a draw holds the tokens up to the one it follows.
        tokens = jnp.where(jnp.arange(tokens.shape[1]) == 0, latest[:, None], tokens)
        path = jnp.where(jnp.tri(tokens.shape[1], dtype=bool), tokens[:, None], -1)
        kv, hidden, sampled, features, was_redrawn, noted = self._computed(device, kv, wide, seated, path)
        accepted = num_accepted(drafts.tokens, drafts.count, sampled)
        drawn = partial(_drawn, device, seated, hidden, sampled, path)
        return Verified(kv, sampled, features, accepted, was_redrawn, noted, drawn)

    def _verified_tree(self, device: Device, kv: KVPool, seated: Seated, tree: Tree, width: int) -> Verified:
        """Verify each row's latest token in its slot and its tree in its tail; accepted nodes are moved out of it."""
        assert self.tails is not None
        batch, page_size, nodes = seated.batch, kv.page_size, tree.tokens.shape[1]
        page, root_index = batch.places((seated.length - 1)[:, None], page_size=page_size)
        in_tail = self.tails.slots(batch, jnp.arange(nodes))
        there = seated.runs[:, None] & jnp.pad(tree.there, ((0, 0), (1, 0)), constant_values=True)
        wide = tokens_of_sequences(
            batch, jnp.concatenate([seated.token[:, None], tree.tokens], axis=1),
            there=there,
            positions=seated.length[:, None] - 1 + jnp.pad(tree.depth, ((0, 0), (1, 0))),
            slots=jnp.concatenate([page * page_size + (seated.length[:, None] - 1) % page_size, in_tail], axis=1),
            limit=jnp.broadcast_to(root_index, there.shape),
            in_use=jnp.where(seated.runs, seated.length, 0),
            num_slots=kv.num_slots,
        )  # fmt: skip
        pages = self.tails.of_rows(batch)
        words = num_words(pages.shape[1] * page_size)
        bits = ancestor_bits(tree, self.tails.offsets(batch), max_depth=width - 1, words=words)
        bits = jnp.where(there[..., None], jnp.pad(bits, ((0, 0), (1, 0), (0, 0))), jnp.uint32(0))
        positions = None
        if device.models[TARGET].config.has_windows:
            positions = positions_of_tails(batch, self.tails, seated.length[:, None] - 1 + tree.depth, words)
        wide = with_tail(wide, pages, bits.reshape(-1, words), page_size=page_size, positions=positions)
        above = jnp.pad(paths(tree, max_depth=width - 1), ((0, 0), (1, 0), (0, 0)), constant_values=-1)
        latest = jnp.broadcast_to(seated.latest_output(device.state[BOUNDS])[:, None, None], (*above.shape[:2], 1))
        before = jnp.concatenate([latest, above], axis=2)
        kv, hidden, sampled, features, was_redrawn, noted = self._computed(device, kv, wide, seated, before)
        path, accepted = accepted_path(tree, sampled, max_depth=width - 1)
        page, index = batch.places(seated.length[:, None] + jnp.arange(width - 1), page_size=page_size)
        moves = seated.runs[:, None] & (path >= 0)
        source = jnp.take_along_axis(in_tail, jnp.maximum(path, 0), axis=1)
        kv = commit_tail(kv, jnp.where(moves, source, -1), jnp.where(moves, page * page_size + index % page_size, -1))
        along = jnp.pad(path + 1, ((0, 0), (1, 0)))  # the root, the path, then the root again as padding

        def on_path(per_node: jax.Array) -> jax.Array:
            return jnp.take_along_axis(per_node, along.reshape(*along.shape, *(1,) * (per_node.ndim - 2)), axis=1)

        features = None if features is None else on_path(features)
        noted = jax.tree.map(on_path, noted)
        tokens = on_path(sampled)

        def drawn() -> Draws:
            return _drawn(device, seated, on_path(hidden), tokens, on_path(before))

        return Verified(kv, tokens, features, accepted, was_redrawn, noted, drawn)

    def _logprobs(self, device: Device, seated: Seated, found: Verified, landed: jax.Array) -> TokenLogprobs:
        """Return log probabilities [R, W] of what a verification drew, of which `landed`, int32 [R, W], are kept."""
        wanted = (seated.batch.wants_list > 0)[:, None] & (landed != -1)
        vocab = device.models[TARGET].config.vocab_size
        likely = self._noting(seated).likely(wanted.reshape(-1), found.drawn, vocab=vocab)
        return found.noted.beside(jax.tree.map(lambda x: x.reshape(*landed.shape, -1), likely))

    def _noting(self, seated: Seated) -> Noting:
        return Noting(seated.batch.wants_logprobs > 0, self.processed)

    def _computed(
        self, device: Device, kv: KVPool, wide: StepBatch, seated: Seated, path: jax.Array
    ) -> tuple[KVPool, jax.Array, jax.Array, jax.Array | None, jax.Array, Noted]:
        """Run N tokens of each of R rows through the target; returns the pool, hidden states [R, N, hidden], the tokens
        int32 [R, N] sampled after each, features [R, N, F * hidden], which of the first ones were redrawn, bool [R],
        and what is noted of all [R, N].

        Args:
            path: int32 [R, N, D], output tokens before each sampled one that the bounds do not count yet; -1: none.
        """
        model: DecoderLM = device.models[TARGET]
        rows = seated.token.shape[0]
        kv, hidden, features = forward_with_features(model, kv, wide, device.backend, self.proposer.capture)
        sampling = sampled_everywhere(wide, seated.batch.samples.sampling)
        seat = jnp.repeat(seated.batch.row_seat, path.shape[1])
        bounded = Bounded(device.state[BOUNDS], seat, sampling.sample_position, path.reshape(-1, path.shape[2]))
        noting = self._noting(seated)
        sampled, noted = jax.tree.map(
            lambda x: x.reshape(rows, -1), noted_tokens(model, hidden, sampling, bounded, noting)
        )
        features = None if features is None else features.reshape(rows, -1, features.shape[-1])
        hidden = hidden.reshape(rows, -1, hidden.shape[-1])
        # Only a sequence's first draw of a round may have a mask.
        of_rows = seated.batch.samples.sampling

        def first_bounded() -> Bounded:
            return Bounded(bounded.bounds, seated.batch.row_seat, of_rows.sample_position, path[:, 0])

        drawn = sampled, noted
        first = jax.tree.map(lambda x: x[:, 0], drawn)
        refused = first_bounded().refused(first[0])
        first = redrawn(first, refused, lambda: within_masks(model, hidden[:, 0], of_rows, first_bounded(), noting))
        # Not `.at[:, 0].set`, which is a kernel of its own for each of them.
        is_first = jnp.arange(path.shape[1]) == 0
        sampled, noted = jax.tree.map(lambda x, new: jnp.where(is_first, new[:, None], x), drawn, first)
        return kv, hidden, sampled, features, refused, noted


def _drawn(device: Device, seated: Seated, hidden: jax.Array, sampled: jax.Array, path: jax.Array) -> Draws:
    """Return the draws [R * W] of a path of each row.

    Args:
        hidden: [R, W, hidden].
        sampled: int32 [R, W], after each.
        path: int32 [R, W, D], output tokens before each that the bounds do not count yet; -1: none.
    """
    width = sampled.shape[1]
    position = (seated.length[:, None] + jnp.arange(width)).reshape(-1)
    sampling = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), seated.batch.samples.sampling)
    sampling = replace(sampling, sample_position=position)
    seat = jnp.repeat(seated.batch.row_seat, width)
    bounded = Bounded(device.state[BOUNDS], seat, position, path.reshape(-1, path.shape[2]))
    logits = logits_after(device.models[TARGET], hidden.reshape(-1, hidden.shape[2]))
    return Draws(logits, sampled.reshape(-1), sampling, bounded)


def _of_rows(runs: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Select the new array [R, ...] for rows that run, and the old one for others."""
    return jnp.where(runs.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def _counted(bounds: Bounds, seated: Seated, landed: jax.Array) -> Bounds:
    """Count landed tokens int32 [R, W], -1 after the last, in the bounds; the last is the latest, not counted yet."""
    known = jnp.concatenate([seated.token[:, None], landed[:, :-1]], axis=1)
    tokens = jnp.where(landed != -1, known, -1)
    position = seated.length[:, None] - 1 + jnp.arange(landed.shape[1])
    return counted(bounds, seated.batch.row_seat, position, tokens)


def _seated(batch: StepBatch, seats: Seats, goes_on: jax.Array, width: int) -> Seated:
    """Return the rows at the start of a round, with the drafts that fit before each one's end and in its pages."""
    token, length, runs = latest_tokens(batch, seats)
    runs &= goes_on
    room = jnp.minimum(batch.capacity, batch.samples.max_len - 1) - length
    wanted = jnp.minimum(jnp.minimum(batch.max_drafts, width - 1), room)
    samples = batch.samples
    position = jnp.where(runs, length, -1)
    samples = replace(samples, sampling=replace(samples.sampling, sample_position=position))
    return Seated(replace(batch, samples=samples), token, length, jnp.where(runs, jnp.maximum(wanted, 0), 0), runs)
