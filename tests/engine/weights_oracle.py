"""What requests get whose weights change on the way: keys and values stay as each version has computed them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.dense import causal_attention
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.noise import gumbel
from jaxinfer.scheduling.request import Request
from kernels_pallas.rotate_and_write.reference import rotate

PADDED = 192
TIE = 1e-4  # logits that differ by less may be ordered either way

type Chain = tuple[tuple[int, Any], ...]  # (tokens computed so far, by which version)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeepsEarlier:
    """An `Attend` over a whole sequence, whose first `kept` tokens have the keys and values that it is given."""

    kept: jax.Array

    def __call__(self, kv: Any, heads: Any) -> tuple[jax.Array, Any]:
        q, k, v = rotate(heads)
        old_k, old_v = kv
        is_old = (jnp.arange(k.shape[0]) < self.kept)[:, None, None]
        k, v = jnp.where(is_old, old_k, k), jnp.where(is_old, old_v, v)
        return causal_attention(q, k, v), (k, v)


class Oracle:
    """Logits of sequences by chains of versions.

    Args:
        models: by version.
    """

    def __init__(self, models: Mapping[Any, DecoderLM]) -> None:
        self.models = models
        self.logits = functools.lru_cache(maxsize=4096)(self._logits)
        self._run = {version: jax.jit(functools.partial(_run, model)) for version, model in models.items()}

    def _logits(self, tokens: tuple[int, ...], chain: Chain, version: Any) -> np.ndarray:
        """float32 [T, vocab] by `version`, after what the chain says was computed before it."""
        ids = np.zeros(PADDED, np.int32)
        ids[: len(tokens)] = tokens
        config = next(iter(self.models.values())).config
        empty = jnp.zeros((PADDED, config.num_kv_heads, config.head_dim))
        kv, kept = [(empty, empty)] * config.num_layers, 0
        for upto, earlier in chain:
            _, kv = self._run[earlier](ids, kv, kept)
            kept = upto
        return np.asarray(self._run[version](ids, kv, kept)[0])


def _run(model: DecoderLM, ids: jax.Array, kv: Any, kept: jax.Array) -> tuple[jax.Array, Any]:
    found = model.with_kv(kv, ids, jnp.arange(ids.shape[0]), KeepsEarlier(kept))
    return model.logits(found.hidden), found.kv


@dataclass
class _Followed:
    request: Request
    epoch: int = 0
    chain: Chain = ()
    tokens: list[tuple[int, Chain, Any]] = field(default_factory=list)  # of each landed one: token, chain, version


class Watch:
    """Notes for every token of an engine's requests which versions have computed what it was sampled from."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.known = core, dict[str, _Followed]()
        core.landing_listeners.append(self._landed)

    def update(self, weights: Mapping[str, Any], version: Any, **options: Any) -> None:
        """Update the target while requests run."""
        core, before = self.core, self.core.weights.version
        core.weights.update(weights, version, "target", is_lent=True, **options)
        for request in core._requests.values():
            followed = self._follow(request)
            if request.pages:
                followed.chain = (*followed.chain, (request.num_computed_tokens, before))
            else:
                followed.chain = ()

    def _follow(self, request: Request) -> _Followed:
        followed = self.known.setdefault(request.request_id, _Followed(request))
        if followed.epoch != request.epoch:
            followed.epoch, followed.chain = request.epoch, ()
        return followed

    def _landed(self, landings: Sequence[Any]) -> None:
        for request, first, last in landings:
            followed = self._follow(request)
            start = request.num_prompt_tokens
            for place in range(first, last):
                [(version, _)] = request.versions.runs(place - start, place - start + 1)
                followed.tokens.append((request.token_ids[place], followed.chain, version))

    def check(self, oracle: Oracle) -> int:
        """Assert that every token is the oracle's and has its version; return how many were sampled."""
        count = 0
        for followed in self.known.values():
            request, params = followed.request, followed.request.sampling_params
            assert [token for token, _, _ in followed.tokens] == request.output_token_ids
            runs = request.versions.runs(0, request.num_output_tokens)
            tags = [version for version, number in runs for _ in range(number)]
            assert tags == [version for _, _, version in followed.tokens]
            for number, (token, chain, version) in enumerate(followed.tokens):
                place = request.num_prompt_tokens + number
                logits = oracle.logits(tuple(request.token_ids), chain, version)[place - 1]
                if params.temperature:
                    key = jnp.asarray(request.request_key, jnp.uint32)
                    noise = gumbel(key, jnp.int32(place), jnp.arange(len(logits)))
                    logits = logits + np.float32(params.temperature) * np.asarray(noise)
                assert logits[token] >= logits.max() - TIE, (request.request_id, number, chain, version)
                count += 1
        return count
