"""Generation for scripts and for teaching: the published algorithms on one sequence, step by step.

The engine samples from the same distributions by faster ways of its own. From the repository's root:

    >>> from jaxinfer.checkpoint.load import load_checkpoint
    >>> from jaxinfer.textbook.speculative.generate import *
    >>> from jaxinfer.tokenizer import Tokenizer
    >>> config, model = load_checkpoint("checkpoints/tiny", dtype="float32")
    >>> tokenizer = Tokenizer("checkpoints/tiny")
    >>> prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Say it twice: a red bird sings."}])
    >>> ends = list(config.eos_token_ids)
    >>> plain = autoregressive_generate(prompt, model, max_gen_len=12, eos_tokens_id=ends)
    >>> storage = NGramStorage(3, config.vocab_size)
    >>> tokens, acceptance_rate = ngram_assisted_speculative_generate(
    ...     prompt, storage, model, tokenizer, max_gen_len=12, eos_tokens_id=ends, stop_if_unknown=True
    ... )
    >>> tokens == plain
    True

`debug=True` shows the rounds. Sampled tokens need a key: `MultinomialProcessor(0.8)` and `key=jax.random.key(0)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.speculative.egag import EntropyGamma, EntropyScale
from jaxinfer.textbook.speculative.beam_search import beam_search_generate
from jaxinfer.textbook.speculative.chain_drafters import ModelDrafter, NGramDrafter
from jaxinfer.textbook.speculative.chain_loop import (
    Continuation,
    Task,
    as_language_model,
    check_integer,
    check_same_vocabulary,
    speculate,
    streams_of,
)
from jaxinfer.textbook.speculative.language_model import LanguageModel
from jaxinfer.textbook.speculative.logits_processors import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from jaxinfer.textbook.speculative.ngram_storage import INgramStorage, NGramStorage, OneLevelNGramStorage
from jaxinfer.textbook.speculative.random_streams import Streams
from jaxinfer.textbook.speculative.step_view import StepView

__all__ = [
    "GreedyProcessor",
    "MultinomialProcessor",
    "NGramStorage",
    "NucleusProcessor",
    "OneLevelNGramStorage",
    "TopKNucleusProcessor",
    "TopKProcessor",
    "autoregressive_generate",
    "beam_search_generate",
    "ngram_assisted_speculative_generate",
    "speculative_generate",
]

GREEDY = GreedyProcessor()


def autoregressive_generate(
    inputs: Sequence[int],
    model: LanguageModel | DecoderLM,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor = GREEDY,
    eos_tokens_id: int | Sequence[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = True,
    debug: bool = False,
    *,
    key: jax.Array | Streams | None = None,
) -> list[int]:
    """Generate one token after the other; the reference for the other functions.

    Args:
        inputs: token ids of the prompt, at least one.
        model: computes the logits.
        max_gen_len: most tokens to generate; fewer at the end of the model's longest sequence.
        logits_processor: turns logits into distributions.
        eos_tokens_id: the end token, or several.
        pad_token_id: fills places without a token; no output depends on it.
        use_cache: False computes the whole sequence again for every token, with the same result.
        debug: print where an end token was found.
        key: a jax.random key (or `Streams`); only a greedy processor needs none.

    Returns:
        Generated token ids, the end token included.

    Raises:
        ValueError: an argument is out of range; the message has its name, its value and what is allowed.
    """
    model = as_language_model("model", model)
    task = Task.of(inputs, model, max_gen_len, eos_tokens_id, pad_token_id)
    streams = streams_of(key, logits_processor)
    reader, text = task.reader(model, use_cache), Continuation(task)
    while not text.finished:
        probabilities = logits_processor(reader.logits(text.tokens)[0])
        text.extend([logits_processor.sample(probabilities, streams.final)])
    if debug and text.generated[-1] in task.eos:
        StepView().end_token_found(len(text.tokens) - 1)
    return text.generated


def speculative_generate(
    inputs: Sequence[int],
    drafter: LanguageModel | DecoderLM,
    target: LanguageModel | DecoderLM,
    tokenizer: Any = None,
    gamma: int = 5,
    use_egag: bool = False,
    gamma_min: int = 1,
    gamma_max: int | None = None,
    egag_ema_beta: float = 0.0,
    logits_processor: LogitsProcessor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: int | Sequence[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = True,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    key: jax.Array | Streams | None = None,
    entropy_scale: EntropyScale = "vocabulary",
) -> tuple[list[int], float]:
    """Generate the target's tokens with a smaller model's drafts, by the rule of speculative sampling.

    See `classic_rule`. The output is distributed as that of `autoregressive_generate`, and greedy output equals it.

    Args:
        inputs: token ids of the prompt, at least one.
        drafter: a model with the target's vocabulary.
        target: the model whose distributions are sampled.
        tokenizer: decodes tokens for the debug view, see `StepView`.
        gamma: drafts of a round; fewer near the end, after a drafted end token, or with EGAG.
        use_egag: choose each round's number of drafts by the drafter's entropy (see `EntropyGamma`).
        gamma_min: least number with EGAG.
        gamma_max: greatest number with EGAG; None: `gamma`.
        egag_ema_beta: weight of earlier rounds with EGAG.
        logits_processor: turns the logits of both models into distributions.
        max_gen_len: most tokens to generate; fewer at the end of the target's longest sequence.
        eos_tokens_id: the end token, or several. The earliest one ends the output.
        pad_token_id: fills places without a token; no output depends on it.
        use_cache: False computes whole sequences again in every step, with the same result.
        skip_sample_adjustment: draw from the target's whole distribution after a rejection. Biased, for comparison.
        first_target: draw the first token from the target, before any drafts.
        debug: print every round.
        key: a jax.random key (or `Streams`); only a greedy processor needs none.
        entropy_scale: the entropy that counts as uncertain with EGAG, see `EntropyGamma`.

    Returns:
        Generated token ids, the end token included, and the acceptance rate: accepted drafts / all drafts (0 if there
        were none).

    Raises:
        ValueError: an argument is out of range; the message has its name, its value and what is allowed.
    """
    drafter, target = as_language_model("drafter", drafter), as_language_model("target", target)
    check_same_vocabulary(("drafter", "target"), (drafter.vocab_size, target.vocab_size))
    task = Task.of(inputs, target, max_gen_len, eos_tokens_id, pad_token_id)
    check_integer("gamma", gamma, 0)
    egag = None
    if use_egag:
        gamma_max = gamma if gamma_max is None else gamma_max
        check_integer("gamma_max", gamma_max, 1)
        check_integer("gamma_min", gamma_min, 1)
        egag = EntropyGamma(target.vocab_size, gamma_min, gamma_max, egag_ema_beta, entropy_scale)
    streams = streams_of(key, logits_processor)
    drafts = ModelDrafter(task.reader(drafter, use_cache), gamma, logits_processor, streams.draft, task.eos, egag)
    return speculate(
        task,
        task.reader(target, use_cache),
        drafts,
        logits_processor,
        streams,
        first_target=first_target,
        skip_sample_adjustment=skip_sample_adjustment,
        view=StepView(tokenizer) if debug else None,
    )


def ngram_assisted_speculative_generate(
    inputs: Sequence[int],
    ngramstorage: INgramStorage,
    target: LanguageModel | DecoderLM,
    tokenizer: Any = None,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: LogitsProcessor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: int | Sequence[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = True,
    first_target: bool = True,
    stop_if_unknown: bool = False,
    debug: bool = False,
    skip_sample_adjustment: bool = False,
    *,
    key: jax.Array | Streams | None = None,
) -> tuple[list[int], float]:
    """Generate the target's tokens with drafts from n-grams that are learned meanwhile.

    N-gram assisted speculative decoding is from the project romsto/Speculative-Decoding. Its verification is replaced
    by the rule of speculative sampling for a certain draft: accept x with p(x), else draw from p without x. The output
    is distributed as that of `autoregressive_generate`, and greedy output equals it, whatever the storage holds.

    Args:
        ngramstorage: has the target's vocabulary. It learns the prompt, the generated tokens and the filler, and keeps
            earlier n-grams.
        filler_top_k: from 2 on, it also learns this many of the target's most likely tokens at every generated place.
        stop_if_unknown: a round drafts nothing after an unknown context; otherwise it drafts a random token.
        inputs, target, tokenizer, gamma, logits_processor, max_gen_len, eos_tokens_id, pad_token_id, use_cache,
            first_target, debug, skip_sample_adjustment, key: as for `speculative_generate`.

    Returns:
        Generated token ids, the end token included, and the acceptance rate: accepted drafts / all drafts (0 if there
        were none).

    Raises:
        ValueError: an argument is out of range; the message has its name, its value and what is allowed.
    """
    target = as_language_model("target", target)
    check_same_vocabulary(("ngramstorage", "target"), (ngramstorage.vocab_size, target.vocab_size))
    task = Task.of(inputs, target, max_gen_len, eos_tokens_id, pad_token_id)
    check_integer("gamma", gamma, 0)
    check_integer("filler_top_k", filler_top_k, 1)
    streams = streams_of(key, logits_processor)
    ngramstorage.initialize(task.prompt)
    return speculate(
        task,
        task.reader(target, use_cache),
        NGramDrafter(ngramstorage, gamma, filler_top_k, stop_if_unknown, streams.draft, task.eos),
        logits_processor,
        streams,
        first_target=first_target,
        skip_sample_adjustment=skip_sample_adjustment,
        view=StepView(tokenizer) if debug else None,
    )
