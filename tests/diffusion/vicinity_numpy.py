"""The truth of bidirectional diffusion with stored keys and values and smoothed embeddings: a plain NumPy loop.

What dInfer calls BlockWise, VicinityCache and IterSmoothWithVicinityCache, with its parallel decoders, for one sequence
and without unrolling. The forward computes in float64 and shares nothing with the engine but the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.experts import SparseMLP
from tests.diffusion.oracle import Rule, draw
from tests.models.mixture_numpy import ling_experts
from tests.sampling.reference import Filters
from tests.speculative.decoder_numpy import attend, log_softmax, rms_norm, rotate

type Cache = Literal["none", "prefix", "dual"]
type KV = list[tuple[np.ndarray, np.ndarray]]  # of every layer, keys and values [T, kv_heads, d] of the sequence

# What `generate` does wrong where it is asked to; a comparison that lets one of them pass compares too little.
BUGS = (
    "convex",  # the mask's embedding gives way to the mix, instead of keeping its full weight
    "constant_weight",  # w does not grow
    "reset_by_block",  # rounds are counted anew in every block
    "no_refresh",  # keys and values are stored once
    "window_is_block",  # prefix_look and after_look are ignored
    "reembed_block_only",  # of what was forwarded, only the block gets new embeddings
    "mask_drawn",  # MASK is a token like any other
    "block_causal",  # a token sees no block after its own, though both are on the canvas
)


@dataclass(frozen=True)
class Smooth:
    """IterSmooth: the embeddings of masked places carry what the last forward thought of them."""

    warmup_steps: int = 0
    cont_weight: float = 0.3
    cont_weight_init: float = 0.15
    cont_weight_growth: float = 0.02
    threshold_decay: float = 0.02

    def weight(self, number: int) -> float:
        """w of a round."""
        return min(self.cont_weight_init + self.cont_weight_growth * number, self.cont_weight)

    def threshold(self, number: int, least: float) -> float:
        """tau of a round."""
        return max(1 - self.threshold_decay * number, least)


@dataclass(frozen=True)
class Credit:
    """CreditThreshold: a token that was on top of its place before counts for more there."""

    alpha: float = 0.7
    gamma: float = 0.2
    beta: float = 0.8


@dataclass(frozen=True)
class Round:
    """One forward that decoded. Places are those of the sequence, prompt included."""

    kind: str  # "whole": nothing is stored; "refresh": whole, and keys and values are stored; "window"
    block: int  # where the block starts
    window: tuple[int, int]  # [l, r) that was forwarded
    weight: float  # w; 0 without smoothing
    threshold: float  # tau
    tokens: tuple[int, ...]  # of the whole sequence after the round, masks included
    committed: tuple[int, ...]  # the places that got their tokens in this round, ascending
    logits: np.ndarray = field(compare=False, repr=False)  # float32 [e - s, vocab] of the block, MASK's at -inf


@dataclass
class Decoded:
    tokens: list[int]
    rounds: list[Round]
    logprobs: list[float]  # of the tokens, in the rounds that committed them


def generate(
    model: DecoderLM,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    block_size: int,
    rule: Callable[[float], Rule],
    threshold: float,
    cache: Cache,
    prefix_look: int = 0,
    after_look: int = 0,
    smooth: Smooth | None = None,
    eos: Collection[int] = (),
    filters: Filters | None = None,
    request_key: tuple[int, int] = (0, 0),
    early_stop: bool = True,
    credit: Credit | None = None,
    bug: str = "",
) -> Decoded:
    """What comes after a prompt of P tokens, up to and with the first generated ending token.

    The sequence is [prompt | MASK * num_tokens], T tokens that all see each other. Blocks [s, e) start at P, P + B,
    P + 2B, ...; the last one may be shorter. A block takes rounds until it has no mask. A round is one forward, of
    which the rows of the block are decoded: MASK's logit is -inf, a token is drawn for each place, and the rule commits
    some of the masked ones by their tokens' probabilities. Rounds are numbered from 0 through the whole sequence; the
    noise of a draw depends on that number and on the place.

    What is forwarded:
        whole: [0, T), nothing is stored. With cache "none", and in the first `warmup_steps` rounds of smoothing.
        refresh: [0, T), and K and V of all layers are stored. The first round of a block that is neither of the above:
            one for each block, also for the one in which the warm-up ends.
        window: what remains. The window's own K and V stand in for the stored ones, all others are as stored.
            "prefix": [s - prefix_look, T). "dual": [s - prefix_look, e + after_look). Both are cut at 0 and T.

    Smoothing: the forward reads embeddings e [T, H], at first E[x]. Round n has w = min(init + growth * n, cont_weight)
    and tau = max(1 - decay * n, threshold), and leaves, at the places that it forwarded, e = E[x] where a token is by
    now, and e = E[MASK] + w * softmax(logits) @ E where none is, of the model's logits without MASK. Without smoothing
    e is E[x] in every round, and tau is `threshold`.

    Credit C [B, V] is 0 as a block begins. Each round makes it beta * C, and adds p ** gamma to the likeliest token of
    each masked place, which has probability p. Token and confidence come from logits + alpha * ln(1 + C), while
    smoothing and `logprobs` know nothing of credit.

    Args:
        block_size: B.
        rule: makes the rule of a round from tau; a rule without a threshold ignores it.
        early_stop: no block is begun after one that has got an ending token.
        bug: what to do wrong; see `BUGS`.
    """
    assert not bug or bug in BUGS, f"{bug} is none of {BUGS}"
    mask, first, total = model.config.mask_token_id, len(prompt), len(prompt) + num_tokens
    assert mask is not None and mask not in prompt, "a prompt has no masks"
    filters = filters or Filters(temperature=0.0)
    table = _array(model.embed.embedding)
    x = np.asarray([*prompt, *[mask] * num_tokens], np.int64)
    embeddings, logprobs = table[x], np.zeros(total)
    stored: KV | None = None
    stored_in_block = -1
    number, rounds = 0, []
    for start in range(first, total, block_size):
        end = min(start + block_size, total)
        number = 0 if bug == "reset_by_block" else number
        credits = np.zeros((end - start, len(table)), np.float32)
        for _ in range(start, end):  # every round commits something
            masked = x[start:end] == mask
            if not masked.any():
                break
            weight = 0.0 if smooth is None else smooth.weight(number)
            if smooth is not None and bug == "constant_weight":
                weight = smooth.cont_weight
            tau = threshold if smooth is None else smooth.threshold(number, threshold)

            is_fresh = stored is not None and (stored_in_block == start or bug == "no_refresh")
            if cache == "none" or (smooth is not None and number < smooth.warmup_steps):
                kind, left, right = "whole", 0, total
            elif not is_fresh:
                kind, left, right = "refresh", 0, total
            else:
                looks = (0, 0) if bug == "window_is_block" else (prefix_look, after_look)
                kind, left = "window", max(0, start - looks[0])
                right = total if cache == "prefix" else min(total, end + looks[1])

            blocks = model.config.block_size or block_size if bug == "block_causal" else total
            logits, kv = _forward(model, embeddings, left, right, stored if kind == "window" else None, blocks)
            # A window's K and V replace the stored ones for its own forward. Had they stayed, nothing would change: all
            # windows until the next refresh are the same, and each replaces all of its places.
            if kind == "refresh":
                stored, stored_in_block = kv, start
            if bug != "mask_drawn":
                logits[:, mask] = -np.inf

            scores = own = logits[start - left : end - left]
            if credit is not None:
                credits *= credit.beta
                top = own.argmax(axis=1)
                probability = np.exp(log_softmax(own))[np.arange(end - start), top]
                credits[masked, top[masked]] += probability[masked] ** credit.gamma
                scores = own + np.float32(credit.alpha) * np.log1p(credits)
            drawn, confidence = draw(scores, start, number, filters, request_key)
            places = sorted(rule(tau)(confidence, masked))
            assert places and masked[places].all(), f"a rule commits some of the masks, not {places}"
            committed = [start + place for place in places]
            x[committed] = drawn[places]
            logprobs[committed] = log_softmax(own.astype(np.float64))[places, drawn[places]]

            if smooth is None:
                embeddings = table[x]
            else:
                made = (start, end) if bug == "reembed_block_only" else (left, right)
                for place in range(*made):
                    embeddings[place] = table[x[place]]
                    if x[place] == mask:
                        mix = np.exp(log_softmax(logits[place - left])) @ table
                        kept = 1 - weight if bug == "convex" else 1
                        embeddings[place] = kept * table[mask] + weight * mix
            number += 1
            rounds.append(Round(kind, start, (left, right), weight, tau, tuple(x.tolist()), tuple(committed), own))
        if early_stop and any(token in eos for token in x[start:end]):
            break
    ends = [place + 1 for place in range(first, total) if x[place] in eos]
    length = ends[0] if ends else total
    return Decoded(x[first:length].tolist(), rounds, logprobs[first:length].tolist())


def _forward(
    model: DecoderLM, embeddings: np.ndarray, left: int, right: int, stored: KV | None, blocks: int
) -> tuple[np.ndarray, KV]:
    """float32 [r - l, vocab]: logits of the places l to r - 1, of which `embeddings` [T, H] has those of all; and the
    K and V that they have seen.

    Args:
        model: a Llama, a Qwen3, a LLaDA, a LLaDA-MoE or a LLaDA2, without biases and with plain rotary frequencies.
        stored: K and V, of which those at l to r - 1 are replaced; None: there are no others.
        blocks: size of blocks that see no later one; T: all tokens see each other.
    """
    config = model.config
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias), "this forward knows none of them"
    assert config.rope.rope_type == "default" and config.hidden_act == "silu"
    assert stored is not None or (left, right) == (0, len(embeddings))
    eps, positions = config.rms_norm_eps, np.arange(left, right)
    visible = positions[:, None] // blocks >= np.arange(len(embeddings))[None] // blocks
    x, seen = embeddings[left:right].astype(np.float64), []
    for number, layer in enumerate(model.layers):
        normed = rms_norm(x, _array(layer.input_norm.scale), eps)
        # Of each KV head: its queries, its key, its value.
        qkv = np.einsum("th,kgdh->tkgd", normed, _array(layer.attention.qkv.kernel))
        q, k, v = qkv[:, :, :-2].reshape(len(x), config.num_heads, -1), qkv[:, :, -2], qkv[:, :, -1]
        q_norm, k_norm = layer.attention.q_norm, layer.attention.k_norm
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, _array(q_norm.scale), eps), rms_norm(k, _array(k_norm.scale), eps)
        q, k = (_rotated(part, positions, config) for part in (q, k))
        if stored is not None:
            new, (k, v) = (k, v), (part.copy() for part in stored[number])
            k[left:right], v[left:right] = new
        seen.append((k, v))
        found = attend(q, k, v, visible)
        x = x + found @ _array(layer.attention.o.kernel).reshape(config.hidden_size, -1).T
        normed = rms_norm(x, _array(layer.post_attention_norm.scale), eps)
        x = x + (_experts if isinstance(layer.mlp, SparseMLP) else _gated)(layer.mlp, normed, config)
    x = rms_norm(x, _array(model.final_norm.scale), eps)
    words = model.embed.embedding if model.lm_head is None else model.lm_head.kernel
    return (x @ _array(words).T).astype(np.float32), seen


def _rotated(x: np.ndarray, positions: np.ndarray, config: ModelConfig) -> np.ndarray:
    """x [T, heads, d] turned by positions [T]: of both halves of a head, the first elements, as many as are turned."""
    half, turned = config.head_dim // 2, config.rotary_dim // 2
    pairs = np.concatenate([x[..., :turned], x[..., half : half + turned]], axis=-1)
    first, second = np.split(rotate(pairs, positions, config.rope.theta), 2, axis=-1)
    return np.concatenate([first, x[..., turned:half], second, x[..., half + turned :]], axis=-1)


def _gated(mlp: Any, x: np.ndarray, config: ModelConfig) -> np.ndarray:
    gate, up = np.einsum("th,igh->gti", x, _array(mlp.gate_up.kernel))
    return gate / (1 + np.exp(-gate)) * up @ _array(mlp.down.kernel).T


def _experts(mlp: SparseMLP, x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """[T, hidden] of x [T, hidden], by the experts of `mixture_numpy`, with the names that these have."""
    experts = config.experts
    assert experts is not None
    tensors = {"gate.weight": _array(mlp.router.kernel)}
    if mlp.router.bias is not None:
        tensors["gate.expert_bias"] = _array(mlp.router.bias)
    each = {f"experts.{number}.": kernels for number, kernels in enumerate(zip(
        _array(mlp.gate_up.kernel), _array(mlp.down.kernel), strict=True
    ))}  # fmt: skip
    if mlp.shared is not None:
        each["shared_experts."] = _array(mlp.shared.gate_up.kernel), _array(mlp.shared.down.kernel)
    for name, (gate_up, down) in each.items():
        tensors |= {name + "gate_proj.weight": gate_up[:, 0], name + "up_proj.weight": gate_up[:, 1]}
        tensors[name + "down_proj.weight"] = down
    fields = {
        "num_experts_per_tok": experts.experts_per_token, "norm_topk_prob": experts.normalizes,
        "routed_scaling_factor": experts.scaling, "score_function": experts.score, "n_group": experts.num_groups,
        "topk_group": experts.kept_groups, "num_shared_experts": int(mlp.shared is not None),
    }  # fmt: skip
    return ling_experts(fields, tensors, "", x)


def _array(parameter: Any) -> np.ndarray:
    return np.asarray(parameter[...])
