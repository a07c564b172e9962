"""The tokenizer of the embedded checkpoint: byte-level BPE, role tokens, plan tags, chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.corpus import Sample

VOCAB_SIZE = 2048
PAD, END_OF_TURN, MASK = "<|endoftext|>", "<|end|>", "[MASK]"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (PAD, END_OF_TURN, *ROLES.values(), MASK)
# Shown in decoded text, because a reader of a plan needs them: added tokens, but not special ones.
TAGS = ("[PLAN]", "[DIRECT]", "[ANSWER]", "[END]")

# Where merges may not cross. A space belongs to the word after it, but not when that begins with a capital: so a name
# is the same tokens at the start of a text, within it and in quotes, and copying it is copying tokens.
WORDS = r"[.!?,:;]? (?=\p{Lu})| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"

_TAG = re.compile("|".join(re.escape(tag) for tag in TAGS))

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('role ' + message['role'] + ' is unknown, allowed are system, user, assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def render(sample: Sample) -> str:
    """The document as the chat template writes it; plain text ends with the end-of-turn token as well."""
    if not sample.messages:
        return sample.text + END_OF_TURN
    return "".join(ROLES[message["role"]] + message["content"] + END_OF_TURN for message in sample.messages)


def plain_texts(sample: Sample) -> list[str]:
    """What the merges are learned from: contents without tags, which are tokens of their own."""
    contents = [message["content"] for message in sample.messages] or [sample.text]
    return [part for content in contents for part in _TAG.split(content) if part]


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train on plain texts. Every digit is a token of its own, every byte is in the vocabulary, so that any text
    survives a round trip. Deterministic for the same texts in the same order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(TAGS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAGS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}: too few texts")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        mask_token=MASK,
        extra_special_tokens=list(ROLES.values()),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the Hugging Face files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(directory))


def encode_document(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> tuple[list[int], list[bool]]:
    """Token ids of a document, and which of them the model is to write (answers and their end; all of a plain text)."""
    backend = tokenizer.backend_tokenizer
    if not sample.messages:
        ids = backend.encode(render(sample)).ids
        return ids, [True] * len(ids)
    ids, wanted = [], []
    for message in sample.messages:
        body = backend.encode(ROLES[message["role"]] + message["content"] + END_OF_TURN).ids
        ids += body
        written = message["role"] == "assistant"
        wanted += [False] + [written] * (len(body) - 1)
    return ids, wanted


def token_ids(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> dict[str, int]:
    """The ids of the given tokens. Raises ValueError for one that is not in the vocabulary."""
    vocabulary: dict[str, Any] = tokenizer.get_vocab()
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise ValueError(f"tokens {missing} are not in the vocabulary")
    return {token: vocabulary[token] for token in tokens}


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a directory that `save_tokenizer` wrote, or of a checkpoint that holds its files."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
    for how in ("is_local", "local_files_only"):  # saved again, the files are the same
        tokenizer.init_kwargs.pop(how, None)
    return tokenizer
