"""The NumPy loop of bidirectional diffusion does what its specification says, and its planted bugs show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.rope import RopeConfig
from tests.builders import model_config, random_model, random_prompts
from tests.diffusion.oracle import BlockAttend, Rule, by_factor, by_hierarchy, by_threshold
from tests.diffusion.vicinity_numpy import BUGS, Credit, Decoded, Smooth, generate
from tests.sampling.reference import Filters

MASK, BLOCK, NUM_TOKENS = 100, 8, 21
THRESHOLD = 0.25  # random models are never sure: this commits several tokens in some rounds, and one in others
TINY: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "head_dim": 8, "num_kv_heads": 2, "rope": RopeConfig(), "mask_token_id": MASK,
    "o_bias": False, "mlp_bias": False,
}  # fmt: skip
PROMPT = random_prompts([13], vocab_size=MASK)[0]
# tau falls fast, to where several tokens are committed at once; the warm-up ends inside the first block.
SMOOTH = Smooth(warmup_steps=3, threshold_decay=0.2)
RULES: dict[str, Callable[[float], Rule]] = {
    "threshold": by_threshold,
    "hierarchy": lambda tau: by_hierarchy(tau, 0.05),
    "factor": lambda _: by_factor(2.5),
}
CACHES: tuple[dict[str, Any], ...] = (
    {"cache": "none"},
    {"cache": "prefix"},
    {"cache": "prefix", "prefix_look": 5},
    {"cache": "dual"},
    {"cache": "dual", "prefix_look": 5, "after_look": 3},
)


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return random_model(model_config("LlamaForCausalLM", **TINY), seed=5)


def decoded(model: DecoderLM, **more: Any) -> Decoded:
    given = {"block_size": BLOCK, "rule": by_threshold, "threshold": THRESHOLD, "cache": "dual", **more}
    return generate(model, PROMPT, NUM_TOKENS, **given)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3ForCausalLM", "LLaDAMoEModelLM", "LLaDA2MoeModelLM"])
def test_without_cache_and_smoothing_it_is_the_models_greedy_choice_in_every_round(family):
    rope = RopeConfig(partial_rotary_factor=0.5 if family == "LLaDA2MoeModelLM" else 1.0)
    model = random_model(model_config(family, **{**TINY, "rope": rope}))
    x = [*PROMPT, *[MASK] * NUM_TOKENS]
    for found in decoded(model, cache="none").rounds:
        hidden = model(jnp.asarray(x), jnp.arange(len(x)), BlockAttend(len(x)))
        logits = np.array(model.logits(hidden))
        logits[:, MASK] = -np.inf
        block = np.arange(found.block, min(found.block + BLOCK, len(x)))
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        masked = np.asarray(x)[block] == MASK
        committed = block[sorted(by_threshold(THRESHOLD)(probabilities[block].max(axis=1), masked))]
        for place in committed:
            x[place] = int(logits[place].argmax())
        assert (found.kind, found.tokens, found.committed) == ("whole", tuple(x), tuple(committed))
    assert MASK not in x


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("smooth", [None, SMOOTH])
def test_blocks_end_in_order_without_masks_after_one_refresh_each(model, rule, cache, smooth):
    found = decoded(model, rule=RULES[rule], smooth=smooth, **cache)
    assert len(found.tokens) == len(found.logprobs) == NUM_TOKENS and MASK not in found.tokens
    assert 3 <= len(found.rounds) < NUM_TOKENS
    places = [place for each in found.rounds for place in each.committed]
    assert sorted(places) == list(range(len(PROMPT), len(PROMPT) + NUM_TOKENS))
    for before, after in zip(found.rounds, found.rounds[1:], strict=False):
        assert after.block == before.block or MASK not in before.tokens[: after.block]
    warmup = smooth.warmup_steps if smooth else 0
    assert {each.kind for each in found.rounds[:warmup]} <= {"whole"}
    for block in range(len(PROMPT), len(PROMPT) + NUM_TOKENS, BLOCK):
        kinds = [each.kind for each in found.rounds[warmup:] if each.block == block]
        if cache["cache"] == "none":
            assert set(kinds) <= {"whole"}
        else:
            assert kinds[:1] in ([], ["refresh"]) and set(kinds[1:]) <= {"window"}


@pytest.mark.parametrize(
    ("cache", "window"),
    list(zip(CACHES[1:], [(21, 34), (16, 34), (21, 29), (16, 32)], strict=True)),
    ids=str,
)
def test_windows_are_the_block_and_what_is_looked_at(model, cache, window):
    found = decoded(model, **cache)
    assert {each.window for each in found.rounds if (each.kind, each.block) == ("window", 21)} == {window}
    assert {each.window for each in found.rounds if each.kind != "window"} == {(0, 34)}


@pytest.mark.parametrize("smooth", [None, SMOOTH])
def test_a_window_over_everything_needs_no_cache(model, smooth):
    without = decoded(model, cache="none", smooth=smooth)
    for cache in ("prefix", "dual"):
        found = decoded(model, cache=cache, prefix_look=99, after_look=99, smooth=smooth)
        assert [each.tokens for each in found.rounds] == [each.tokens for each in without.rounds]
    assert decoded(model, smooth=smooth).tokens != without.tokens


def test_weight_and_threshold_follow_the_rounds_of_the_sequence(model):
    found = decoded(model, smooth=Smooth()).rounds
    assert len(found) > 10
    for number, each in enumerate(found):
        assert each.weight == pytest.approx(min(0.15 + 0.02 * number, 0.3))
        assert each.threshold == pytest.approx(1 - 0.02 * number)
    assert {(each.weight, each.threshold) for each in decoded(model).rounds} == {(0.0, THRESHOLD)}


def test_smoothing_without_weight_changes_nothing_but_the_threshold(model):
    weightless = Smooth(cont_weight=0.0, cont_weight_init=0.0, cont_weight_growth=0.0)
    found, plain = (decoded(model, rule=RULES["factor"], smooth=smooth) for smooth in (weightless, None))
    assert [each.tokens for each in found.rounds] == [each.tokens for each in plain.rounds]


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_changes_what_rounds_commit(model, bug):
    right, wrong = (decoded(model, bug=planted, smooth=SMOOTH, prefix_look=5, after_look=3) for planted in ("", bug))
    assert [each.tokens for each in wrong.rounds] != [each.tokens for each in right.rounds]


def test_generation_ends_behind_the_block_of_the_first_ending_token(model):
    whole = decoded(model, smooth=SMOOTH)
    eos = whole.tokens[10]
    cut = whole.tokens.index(eos) + 1
    stopped, going_on = (decoded(model, smooth=SMOOTH, eos={eos}, early_stop=stop) for stop in (True, False))
    assert stopped.tokens == going_on.tokens == whole.tokens[:cut]
    assert stopped.logprobs == going_on.logprobs == whole.logprobs[:cut]
    assert going_on.rounds == whole.rounds
    last_block = len(PROMPT) + (cut - 1) // BLOCK * BLOCK
    assert stopped.rounds == [each for each in whole.rounds if each.block <= last_block] != whole.rounds


def test_an_ending_token_of_the_prompt_ends_nothing(model):
    eos = next(token for token in PROMPT if token not in decoded(model).tokens)
    assert decoded(model, eos={eos}) == decoded(model)


def test_credit_counts_as_much_as_alpha_says(model):
    plain = decoded(model)
    assert decoded(model, credit=Credit(alpha=0.0)).rounds == plain.rounds
    found = decoded(model, credit=Credit())
    assert len(found.rounds) < len(plain.rounds) and MASK not in found.tokens
    assert (
        decoded(model, credit=Credit(beta=0.1)).rounds != found.rounds != decoded(model, credit=Credit(gamma=2)).rounds
    )


def test_draws_depend_on_the_key_alone(model):
    first, again, other = (
        decoded(model, filters=Filters(temperature=1.0), smooth=SMOOTH, request_key=(0, seed)) for seed in (1, 1, 2)
    )
    assert first == again and first.tokens != other.tokens and MASK not in first.tokens
