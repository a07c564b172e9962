"""Tiny Hugging Face directories: a byte-level tokenizer, a chat template, and a model whose words are known.

The model is a bigram table: embeddings are one-hot, attention and MLP add nothing, and the output head is the table
of logits. So what follows a prompt is defined here, in STORIES: a prompt that ends in the byte `a` is continued by
the tokens of story `a`. A token is part of one story only, so its successor is known.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from jaxinfer import LLM, CompletionOutput, SamplingParams
from jaxinfer.checkpoint.export import export_hf
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import build_model
from jaxinfer.models.rope import RopeConfig

END, STOP, TOOL, USER, ASSISTANT = "<|end|>", "<|stop|>", "<|tool|>", "<|user|>", "<|assistant|>"
SPECIAL = (END, STOP, TOOL, USER, ASSISTANT)
MAX_LEN = 128
ROPE = RopeConfig(max_position_embeddings=MAX_LEN, original_max_position_embeddings=MAX_LEN)
MERGES = (("t", "h"), ("th", "e"), ("i", "n"))
# Tokens are bytes, cut where a test wants a token to end in the middle of a character. A story whose last token is
# END or STOP ends there, unless the end is forbidden: then it continues with story `c`. The others go round in circles.
STORIES: dict[str, tuple[bytes, ...]] = {
    "a": (b"The", b" quick", b" brown", b" fox", b" jumps", b" over", b".", END.encode()),
    "b": (b"caf\xc3", b"\xa9 na", b"\xc3\xafve \xe6", b"\x97", b"\xa5\xe6\x9c\xac", b" \xf0\x9f", b"\x8e", b"\x89!",
          STOP.encode()),
    "c": (b"tick ", b"tock ", b"tack "),
    "d": (b"cut \xe6\x97", END.encode()),
    "e": (b"\xffx", b"y\xc3", b"(\xe2\x82", b"\xf0\x9f\x8e"),
    "f": (b"call ", TOOL.encode(), b"now "),
    ASSISTANT: (b"I am", b" here", b" for", b" you", END.encode()),
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in kept else next(others)) for byte in range(256))


def byte_level_tokenizer(words: Iterable[bytes], merges: Sequence[tuple[str, str]] = ()) -> FastTokenizer:
    """Byte-level BPE: bytes 0 to 255 are tokens 0 to 255, then come merged letters, then `words`, then SPECIAL.

    Words may end in the middle of a character; text is never encoded to them.
    """
    known = [*byte_characters(), *map("".join, merges), *map(_letters, words)]
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys(known))}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


@functools.cache
def fast_tokenizer() -> FastTokenizer:
    """The tokenizer of all checkpoints here: its words are those of the stories."""
    special = {text.encode() for text in SPECIAL}
    return byte_level_tokenizer((t for story in STORIES.values() for t in story if t not in special), MERGES)


def vocab_size() -> int:
    return fast_tokenizer().get_vocab_size()


def token_id(token: bytes | str) -> int:
    """The id of a token, given as its bytes or as its text."""
    raw = token.encode() if isinstance(token, str) else token
    found = fast_tokenizer().token_to_id(raw.decode() if raw.decode(errors="replace") in SPECIAL else _letters(raw))
    assert found is not None, token
    return found


def _letters(raw: bytes) -> str:
    return "".join(byte_characters()[byte] for byte in raw)


def story_ids(key: str, length: int | None = None) -> list[int]:
    """Token ids of a story; the first `length` of them, going round where the story does."""
    ids = [token_id(token) for token in STORIES[key]]
    return ids if length is None else [ids[i % len(ids)] for i in range(length)]


def story_text(key: str, length: int | None = None) -> str:
    """The text of a story (or of its first `length` tokens) without special tokens, incomplete characters as U+FFFD."""
    tokens = [STORIES[key][i % len(STORIES[key])] for i in range(len(STORIES[key]) if length is None else length)]
    return b"".join(token for token in tokens if token.decode(errors="replace") not in SPECIAL).decode(errors="replace")


def tiny_config() -> ModelConfig:
    """One configuration for all models here, so that engines on them share compiled programs; no wider than one-hot."""
    size = vocab_size()
    return ModelConfig(
        "LlamaForCausalLM", vocab_size=size, hidden_size=size, intermediate_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, max_position_embeddings=MAX_LEN, rope=ROPE, eos_token_ids=(token_id(END),),
    )  # fmt: skip


def story_model() -> DecoderLM:
    """The bigram model of STORIES. Successors lead by so much that sampling at temperature 1 never strays."""
    size = vocab_size()
    table = np.zeros((size, size), np.float32)  # [next, this]
    table[token_id(STORIES["c"][0]), :] = 1.0
    for key, story in STORIES.items():
        ids = story_ids(key)
        ends = story[-1].decode(errors="replace") in (END, STOP)
        following = ids if ends else [*ids, ids[0]]
        table[following, [token_id(key), *following[:-1]]] = 2.0

    def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "embed.embedding":
            return np.eye(size, dtype=np.float32)
        if name == "lm_head.kernel":
            return table * 40 / size**0.5
        return np.ones(shape, np.float32) if name.endswith("scale") else np.zeros(shape, np.float32)

    return filled_model(fill)


def random_wide_model(seed: int = 0) -> DecoderLM:
    """A random model whose greedy output wanders through the whole vocabulary, broken characters included."""
    rng = np.random.default_rng(seed)

    def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape)
        if name.endswith("scale"):
            return np.exp(0.4 * noise)
        return noise if name.startswith("embed") else 3 * noise * shape[-1] ** -0.5

    return filled_model(fill)


def filled_model(fill: Callable[[str, tuple[int, ...]], np.ndarray]) -> DecoderLM:
    """A model of `tiny_config` around host arrays, `fill(path, shape)` for each parameter; nothing is computed."""
    config = tiny_config()
    graph, state = nnx.split(nnx.eval_shape(lambda: build_model(config, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    flat = {path: leaf.replace(fill(".".join(map(str, path)), leaf.shape)) for path, leaf in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def write_tokenizer(
    directory: Path, *, fast: FastTokenizer | None = None, chat_template: str | None = CHAT_TEMPLATE
) -> None:
    """Tokenizer files as Hugging Face writes them."""
    (fast or fast_tokenizer()).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)


def write_checkpoint(
    directory: Path,
    *,
    random: bool = False,
    tokenizer: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """A Hugging Face directory of the story model, or of a random one with the same configuration.

    Args:
        generation_config: by default, END and STOP both end a sequence.
    """
    export_hf(random_wide_model() if random else story_model(), tiny_config(), directory)
    if generation_config is None:
        generation_config = {"eos_token_id": [token_id(END), token_id(STOP)]}
    (directory / "generation_config.json").write_text(json.dumps(generation_config))
    if tokenizer:
        write_tokenizer(directory, chat_template=chat_template)
    return directory


def open_llm(directory: Path, **settings: Any) -> LLM:
    """An engine with few batch shapes: 2 rows, 16 tokens a step, pages of 4."""
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 4, "kv_cache_tokens": 512}
    return LLM(directory, **{**limits, **settings})


@contextlib.contextmanager
def story_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The test run's engine on the story model: made once, used by many, left idle."""
    folder = tmp_path_factory.getbasetemp()
    if folder not in _story_llms:
        _story_llms[folder] = open_llm(write_checkpoint(tmp_path_factory.mktemp("story")))
    yield _story_llms[folder]
    assert_idle(_story_llms[folder])


_story_llms: dict[Path, LLM] = {}


def complete(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    """The completion of one prompt, greedy unless a temperature is given."""
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0.0, **params}), use_tqdm=False)
    return output.outputs[0]


def assert_idle(llm: LLM) -> None:
    """Nothing is queued, nothing runs, no page is held."""
    metrics = llm.get_metrics()
    assert (metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_usage_perc) == (0, 0, 0.0)
    llm.core.check_integrity()
