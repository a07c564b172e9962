"""EAGLE-3 drafting: a head continues from features of the target, along a chain or down a tree (Li et al. 2025).

The head has a KV pool of its own with the target's page ids. Its token t pairs the target's feature at t - 1 with the
embedding of t, and is stored in the slot of t. A page thus depends only on its tokens and those before them, and
sequences can share it. Token 0 has no feature before it and is left out: the head sees a sequence from `drafter_start`
on, which is the lower bound of what its tokens see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.models.eagle3 import Eagle3Config, Eagle3Head
from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.programs.forward import padded, paged_attend
from jaxinfer.programs.program import BOUNDS, TARGET, Device
from jaxinfer.programs.weights import detached
from jaxinfer.programs.wide_rows import wide_rows
from jaxinfer.sampling.bounds import Bounded, Bounds
from jaxinfer.sampling.greatest import top_of_rows
from jaxinfer.sampling.noise import gumbel
from jaxinfer.speculative.proposer import Drafts, RoundsShape, Seated, entropies
from jaxinfer.speculative.tails import TailPages, num_words, one_bit, tokens_of_sequences, with_tail
from jaxinfer.speculative.tree import Tree, best_of_pool, pool_size

EAGLE3_HEAD, EAGLE3_STATE = "eagle3_head", "eagle3_state"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle3State:
    """State of a head for S sequences. Programs take it donated and return it."""

    kv: KVPool  # of its one layer; slots are the target's
    feature: jax.Array  # [S, hidden], projected feature of the last token that the target has computed


@dataclass(frozen=True)
class Drawn:
    """The K best tokens after each of Q tokens."""

    tokens: jax.Array  # int32 [Q, K], of the target's vocabulary
    scores: jax.Array  # float32 [Q, K], log-probabilities, of the perturbed logits
    entropy: jax.Array  # float32 [Q], nats


class Eagle3:
    """Proposer that drafts with a head: chains of its best tokens, or trees.

    Args:
        head: of the target.
        tails: where trees are stored; None: it drafts chains only.
        depth: levels of a tree after the first.
        top_k: nodes of a level that are expanded, and children of each.
        with_entropy: whether to compute `Drafts.entropy`, for controllers that need it.
        noise: share of the target's noise that the head drafts with; it changes no token of the output.
    """

    reads = (EAGLE3_HEAD,)
    writes = (EAGLE3_STATE,)
    may_find_nothing = False
    knows_pages = True

    def __init__(
        self,
        head: Eagle3Head,
        tails: TailPages | None,
        *,
        depth: int,
        top_k: int,
        with_entropy: bool = False,
        noise: float = 1.0,
    ) -> None:
        self.models: Mapping[str, Any] = {EAGLE3_HEAD: detached(head)}
        self.capture = head.config.capture
        self._with_entropy = with_entropy
        self._tails, self.depth, self.top_k, self.noise = tails, depth, top_k, noise

    @property
    def tails(self) -> TailPages:
        assert self._tails is not None, "it drafts no trees"
        return self._tails

    def follow(
        self, device: Device, batch: StepBatch, features: jax.Array | None, *, again: bool = False
    ) -> dict[str, Any]:
        assert features is not None
        state: Eagle3State = device.state[EAGLE3_STATE]
        head: Eagle3Head = device.models[EAGLE3_HEAD]
        projected = head.project(features)
        count = batch.token_ids.shape[0]
        first = batch.query_start_loc[batch.row] == jnp.arange(count)
        seat_features = state.feature.at[jnp.maximum(batch.row_seat, 0)].get(mode="clip")[batch.row]
        before = jnp.where(first[:, None], seat_features, jnp.roll(projected, 1, axis=0))
        unknown = (batch.positions == 0) | (first & again)
        taken = replace(batch, slot_mapping=jnp.where(unknown, _nowhere(state.kv, batch), batch.slot_mapping))
        kv, _, _ = self._run(device, state.kv, taken, before)
        last = jnp.maximum(batch.query_start_loc[1:] - 1, 0)
        computed = (jnp.diff(batch.query_start_loc) > 0) & (batch.limit[last] >= 0) & (batch.row_seat >= 0)
        at = jnp.where(computed, batch.row_seat, state.feature.shape[0])
        return {EAGLE3_STATE: Eagle3State(kv, state.feature.at[at].set(projected[last], mode="drop"))}

    def propose(self, device: Device, seated: Seated, shape: RoundsShape) -> tuple[dict[str, Any], Drafts | Tree]:
        state: Eagle3State = device.state[EAGLE3_STATE]
        feature = state.feature.at[jnp.maximum(seated.batch.row_seat, 0)].get(mode="clip")
        kv, hidden, normed = self._one_each(device, state.kv, seated, 0, seated.token, feature, seated.runs)
        if shape.num_nodes:
            kv, drafts = self._tree(device, kv, seated, hidden, normed, shape)
        else:
            kv, drafts = self._chain(device, kv, seated, hidden, normed, shape)
        return {EAGLE3_STATE: replace(state, kv=kv)}, drafts

    def settle(self, device: Device, seated: Seated, landed: jax.Array, features: jax.Array | None) -> dict[str, Any]:
        assert features is not None
        state: Eagle3State = device.state[EAGLE3_STATE]
        projected = device.models[EAGLE3_HEAD].project(features)
        # The last token that landed has not been computed: the next round drafts from it.
        count = jnp.sum(landed >= 0, axis=1)
        wide = wide_rows(
            seated.batch, landed[:, :-1], seated.length, jnp.maximum(count - 1, 0),
            page_size=state.kv.page_size, num_slots=state.kv.num_slots,
        )  # fmt: skip
        more = jnp.any(count > 1)
        before = projected[:, :-1].reshape(-1, projected.shape[-1])
        kv = lax.cond(more, lambda kv: self._run(device, kv, wide, before)[0], lambda kv: kv, state.kv)
        last = jnp.take_along_axis(projected, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
        at = jnp.where(count > 0, seated.batch.row_seat, state.feature.shape[0])
        return {EAGLE3_STATE: Eagle3State(kv, state.feature.at[at].set(last, mode="drop"))}

    def _chain(
        self,
        device: Device,
        kv: KVPool,
        seated: Seated,
        hidden: jax.Array,
        normed: jax.Array,
        shape: RoundsShape,
    ) -> tuple[KVPool, Drafts]:
        """Draft a chain of best tokens, in the slots where accepted drafts stay."""
        wanted, rows = seated.num_drafts, seated.token.shape[0]
        latest = seated.latest_output(device.state[BOUNDS])[:, None]
        drawn = self._drawn(device, normed, seated, 1, 0, latest[:, None])
        drafts = jnp.zeros((rows, shape.width - 1), jnp.int32).at[:, 0].set(drawn.tokens[:, 0])

        def turn(number: jax.Array, carried: tuple[KVPool, jax.Array, jax.Array, jax.Array]) -> tuple[Any, ...]:
            def draft(kv: KVPool, drafts: jax.Array, hidden: jax.Array, entropy: jax.Array) -> tuple[Any, ...]:
                last = lax.dynamic_index_in_dim(drafts, number - 1, axis=1, keepdims=False)
                goes_on = wanted > number
                kv, hidden, normed = self._one_each(device, kv, seated, number, last, hidden, goes_on)
                path = jnp.where(jnp.arange(shape.width - 1) < number, drafts, -1)
                path = jnp.concatenate([latest, path], axis=1)[:, None]
                drawn = self._drawn(device, normed, seated, 1, number, path)
                entropy = jnp.where(goes_on, drawn.entropy, entropy)
                return kv, lax.dynamic_update_index_in_dim(drafts, drawn.tokens[:, 0], number, 1), hidden, entropy

            return lax.cond(jnp.any(wanted > number), draft, lambda *same: same, *carried)

        carried = (kv, drafts, hidden, drawn.entropy)
        if shape.width > 2:
            carried = lax.fori_loop(1, shape.width - 1, turn, carried)
        kv, drafts, _, entropy = carried
        return kv, Drafts(drafts, wanted, entropy)

    def _tree(
        self,
        device: Device,
        kv: KVPool,
        seated: Seated,
        hidden: jax.Array,
        normed: jax.Array,
        shape: RoundsShape,
    ) -> tuple[KVPool, Tree]:
        """Draft a tree of the best nodes of a pool (`best_of_pool`), whose KV is written to the tail."""
        batch, wanted, k = seated.batch, seated.num_drafts, self.top_k
        page_size, rows = kv.page_size, seated.token.shape[0]
        root_index = batch.places((seated.length - 1)[:, None], page_size=page_size)[1]
        pages = self.tails.of_rows(batch)
        words = num_words(pages.shape[1] * page_size)
        offset = self.tails.offsets(batch)
        latest = seated.latest_output(device.state[BOUNDS])[:, None, None]
        drawn = self._drawn(device, normed, seated, k, 0, latest)
        pool_tokens = jnp.zeros((rows, pool_size(self.depth, k)), jnp.int32).at[:, :k].set(drawn.tokens)
        of_first = jnp.where(wanted[:, None] > 0, drawn.scores, -jnp.inf)
        pool_scores = jnp.full(pool_tokens.shape, -jnp.inf).at[:, :k].set(of_first)
        frontiers = jnp.zeros((rows, max(self.depth, 1), k), jnp.int32).at[:, 0].set(jnp.arange(k))

        def grow(level: jax.Array, carried: tuple[Any, ...]) -> tuple[Any, ...]:
            kv, pool_tokens, pool_scores, frontiers, features, bits, path = carried
            frontier = lax.dynamic_index_in_dim(frontiers, level, axis=1, keepdims=False)
            tokens = jnp.take_along_axis(pool_tokens, frontier, axis=1)
            scores = jnp.take_along_axis(pool_scores, frontier, axis=1)
            place = level * k + jnp.arange(k)
            bits = bits | one_bit(offset[:, None] + place, words)
            path = lax.dynamic_update_index_in_dim(path, tokens, level + 1, axis=2)
            nodes = tokens_of_sequences(
                batch, tokens,
                there=scores > -jnp.inf,
                positions=jnp.broadcast_to((seated.length + level)[:, None], tokens.shape),
                slots=self.tails.slots(batch, place),
                limit=jnp.broadcast_to(root_index, tokens.shape),
                in_use=jnp.where(seated.runs, seated.length, 0),
                num_slots=kv.num_slots,
            )  # fmt: skip
            kv, hidden, normed = self._run(
                device, kv, nodes, features.reshape(rows * k, -1), (pages, bits.reshape(rows * k, words))
            )
            drawn = self._drawn(device, normed, seated, k, level + 1, path)
            goes_on = (scores > -jnp.inf) & (wanted > level + 1)[:, None]
            children = jnp.where(goes_on[..., None], scores[..., None] + drawn.scores.reshape(rows, k, k), -jnp.inf)
            children = children.reshape(rows, k * k)
            first = k + level * k * k
            pool_tokens = lax.dynamic_update_slice_in_dim(pool_tokens, drawn.tokens.reshape(rows, -1), first, axis=1)
            pool_scores = lax.dynamic_update_slice_in_dim(pool_scores, children, first, axis=1)
            _, best = lax.top_k(children, k)
            # After the last level this is out of bounds, and dropped.
            frontiers = frontiers.at[:, level + 1].set(first + best, mode="drop")
            parent = best // k
            features = jnp.take_along_axis(hidden.reshape(rows, k, -1), parent[..., None], axis=1)
            bits, path = (jnp.take_along_axis(per_node, parent[..., None], axis=1) for per_node in (bits, path))
            return kv, pool_tokens, pool_scores, frontiers, features, bits, path

        def level_after(level: jax.Array, carried: tuple[Any, ...]) -> tuple[Any, ...]:
            return lax.cond(jnp.any(wanted > level + 1), grow, lambda level, carried: carried, level, carried)

        features = jnp.broadcast_to(hidden[:, None], (rows, k, hidden.shape[-1]))
        bits = jnp.zeros((rows, k, words), jnp.uint32)
        path = jnp.full((rows, k, 1 + self.depth), -1, jnp.int32).at[:, :, 0].set(latest[:, :, 0])
        carried = (kv, pool_tokens, pool_scores, frontiers, features, bits, path)
        kv, pool_tokens, pool_scores, frontiers, _, _, _ = lax.fori_loop(0, self.depth, level_after, carried)
        return kv, best_of_pool(
            pool_tokens, pool_scores, frontiers, num_nodes=shape.num_nodes, wanted=wanted, entropy=drawn.entropy
        )

    def _one_each(
        self,
        device: Device,
        kv: KVPool,
        seated: Seated,
        number: jax.Array | int,
        tokens: jax.Array,
        features: jax.Array,
        there: jax.Array,
    ) -> tuple[KVPool, jax.Array, jax.Array]:
        """Run the head over one token [R] of each sequence, `number` places after the latest, in its own slot."""
        wide = wide_rows(
            seated.batch, tokens[:, None], seated.length - 1 + number, there.astype(jnp.int32),
            page_size=kv.page_size, num_slots=kv.num_slots,
        )  # fmt: skip
        return self._run(device, kv, wide, features)

    def _run(
        self,
        device: Device,
        kv: KVPool,
        batch: StepBatch,
        features: jax.Array,
        tail: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[KVPool, jax.Array, jax.Array]:
        """Run the head over the tokens of a batch; returns its pool, and hidden and normed states [T, hidden].

        Args:
            features: [T, hidden], of the token before each.
            tail: int32 [R, C], the pages of each row's tail, and uint32 [T, W], the bits that tokens see there; None:
                there are none.
        """
        head: Eagle3Head = device.models[EAGLE3_HEAD]
        embed = device.models[TARGET].embed if head.embed is None else head.embed
        seen = batch if tail is None else with_tail(batch, *tail, page_size=kv.page_size)
        seen = replace(seen, first=batch.drafter_start[batch.row])
        attend = paged_attend(head.config.layer, head.dtype, kv, seen, device.backend)
        tokens = batch.token_ids.shape[0]
        token_ids, positions, lengths, before = (
            padded(x, device.backend)
            for x in (batch.token_ids, jnp.maximum(batch.positions - 1, 0), batch.lengths, features)
        )
        found = head(
            embed(token_ids).astype(head.dtype), before, positions, attend, (kv.k[0], kv.v[0]), lengths,
            device.backend.residual(token_ids.shape[0]),
        )  # fmt: skip
        assert found.kv is not None
        k, v = found.kv
        return KVPool((k,), (v,)), found.hidden[:tokens], found.normed[:tokens]

    def _drawn(
        self,
        device: Device,
        normed: jax.Array,
        seated: Seated,
        count: int,
        number: jax.Array | int,
        path: jax.Array,
    ) -> Drawn:
        """Draw the `count` best tokens after Q = R * N states, `number` places beyond the one after the latest token.

        Args:
            path: int32 [R, N, D], output tokens before them that the bounds do not count yet; -1: none.
        """
        head: Eagle3Head = device.models[EAGLE3_HEAD]
        own, words = head.logits(normed), head.target_ids[...]
        sampling = seated.batch.samples.sampling
        bounds: Bounds = device.state[BOUNDS]
        each = path.shape[1]
        bounded = Bounded(
            bounds, jnp.repeat(seated.batch.row_seat, each), jnp.repeat(seated.length + number, each),
            path.reshape(-1, path.shape[2]),
        )  # fmt: skip

        def within_bounds(logits: jax.Array) -> jax.Array:
            target_logits = jnp.full((logits.shape[0], bounds.counts.shape[1]), -jnp.inf).at[:, words].set(logits)
            return bounded.hold(target_logits)[:, words]

        logits = lax.cond(bounded.anyone, within_bounds, lambda logits: logits, own)

        def with_noise() -> jax.Array:
            # All candidates for one position of a sequence have the same noise, whatever was drafted before them.
            position = (seated.length + number)[:, None]
            noise = gumbel(sampling.request_key[:, None], position, words[None])
            noise *= self.noise * sampling.temperature[:, None]
            return (logits.reshape(noise.shape[0], -1, noise.shape[1]) + noise[:, None]).reshape(logits.shape)

        said = lax.cond(jnp.any(sampling.temperature > 0), with_noise, lambda: logits)
        scores, best = top_of_rows(jax.nn.log_softmax(said, axis=-1), count)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)  # -inf: not a node of a tree
        entropy = entropies(own) if self._with_entropy else jnp.zeros(scores.shape[0], jnp.float32)
        return Drawn(words[best], scores, entropy)


def eagle3_state(
    kv: KVPool, config: Eagle3Config, num_seats: int, whole: jax.sharding.Sharding | None = None
) -> Eagle3State:
    """Return the initial state of a head with this pool; abstract, with shapes only, if the pool is.

    Args:
        whole: sharding of the arrays by seats; None: the default device.
    """
    shape, dtype = (num_seats, config.layer.hidden_size), kv.k[0].dtype
    if kv.is_abstract:
        feature: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        return Eagle3State(kv, feature)
    return Eagle3State(kv, jnp.zeros(shape, dtype, device=whole))


def _nowhere(kv: KVPool, batch: StepBatch) -> jax.Array:
    """Return int32 [T], distinct slots out of range, after those of a batch's padding."""
    count = batch.token_ids.shape[0]
    return kv.num_slots + count + jnp.arange(count)
