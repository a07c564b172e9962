"""Prompts as users write them, checked before anything runs."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.tokenizer import Tokenizer

_FORMS = "text, a list of token ids, {'prompt_token_ids': [...]} or {'prompt': ...}"
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_NO_COLLECTIONS = (str, bytes, bytearray)


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt's token ids, its text if given as text, and its cache salt: only equal salts share cached prefixes."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


def as_prompt_list(prompts: Any) -> list[Any]:
    """Return one prompt or many as a list: str, list[int] and {"prompt_token_ids": [...]} are one prompt each.

    Raises:
        ValueError: `prompts` is neither.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not _is_collection(prompts):
        raise ValueError(f"prompts must be {_FORMS}, or a list of these, got {prompts!r}")
    prompts = list(prompts)
    if prompts and _are_tokens(prompts):
        return [prompts]
    return prompts


def tokenize_prompt(prompt: Any, index: int, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    """Tokenise one prompt.

    Raises:
        ValueError: it has no known form, or it is text and there is no tokenizer; the message has its index.
    """
    if isinstance(prompt, Mapping):
        salt = prompt.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise ValueError(f"cache_salt of prompt {index} must be a non-empty string, got {salt!r}")
        if not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise ValueError(f"prompt {index} must have the key prompt or prompt_token_ids, got {list(prompt)}")
        unknown = [key for key in prompt if key not in _KEYS]
        if unknown:
            raise ValueError(f"prompt {index} has unknown keys {unknown}; known are {', '.join(_KEYS)}")
        if "prompt_token_ids" in prompt:
            return TokenizedPrompt(_token_list(prompt["prompt_token_ids"], index), prompt.get("prompt"), salt)
        return replace(tokenize_prompt(prompt["prompt"], index, tokenizer), cache_salt=salt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"prompt {index} is text, but this engine has no tokenizer (the checkpoint has no tokenizer files or "
                "skip_tokenizer_init is set): pass token ids, as {'prompt_token_ids': [...]}"
            )
        try:
            return TokenizedPrompt(tokenizer.encode(prompt), prompt)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    return TokenizedPrompt(_token_list(prompt, index))


def joined_prompts(prefix: Any, suffixes: Any) -> list[Any]:
    """Return the prompts of branches: `prefix` followed by each of `suffixes`, all of them text or all token ids.

    Raises:
        ValueError: a suffix is not of the prefix's form, or there are none.
    """
    if isinstance(suffixes, (str, Mapping)) or not _is_collection(suffixes):
        raise ValueError(f"suffixes must be a list, of texts or of lists of token ids, got {suffixes!r}")
    suffixes = list(suffixes)
    if not suffixes:
        raise ValueError("suffixes is empty: there must be at least 1 branch")
    given: dict[str, Any] = {}
    start = prefix
    if isinstance(prefix, Mapping):
        given = {"cache_salt": prefix.get("cache_salt")}
        start = prefix.get("prompt_token_ids", prefix.get("prompt"))
    if isinstance(start, str):
        for index, suffix in enumerate(suffixes):
            if not isinstance(suffix, str):
                raise ValueError(f"suffix {index} must be text, as the prefix is, got {suffix!r}")
        return [{**given, "prompt": start + suffix} for suffix in suffixes]
    tokens = _token_list(start, 0)
    for index, suffix in enumerate(suffixes):
        if isinstance(suffix, str) or not _is_collection(suffix):
            raise ValueError(f"suffix {index} must be a list of token ids, as the prefix is, got {suffix!r}")
    return [{**given, "prompt_token_ids": [*tokens, *_token_list(suffix, i)]} for i, suffix in enumerate(suffixes)]


def check_prompt(prompt: TokenizedPrompt, index: int, *, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError, naming the prompt's index and the limit, if the prompt cannot be continued."""
    length = len(prompt.token_ids)
    if length == 0:
        raise ValueError(f"prompt {index} is empty: it needs at least 1 token")
    if length >= max_model_len:
        raise ValueError(
            f"prompt {index} has {length} tokens, which leaves no room for one more within "
            f"max_model_len={max_model_len}"
        )
    if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= vocab_size:
        token = next(token for token in prompt.token_ids if not 0 <= token < vocab_size)
        raise ValueError(f"prompt {index} has token id {token}, outside the vocabulary of {vocab_size}")


def _is_token(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _are_tokens(values: Sequence[Any]) -> bool:
    # A fast path: nearly all prompts are plain integers, and one may have a hundred thousand.
    return set(map(type, values)) == {int} or all(map(_is_token, values))


def _is_collection(value: Any) -> bool:
    """Whether this may hold prompts or token ids. Bytes would pass for ids, but are text of an unknown encoding."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0 and not isinstance(value, _NO_COLLECTIONS)


def _token_list(value: Any, index: int) -> list[int]:
    if not _is_collection(value):
        raise ValueError(f"prompt {index} must be {_FORMS}, got {value!r}")
    tokens = list(value)
    if not _are_tokens(tokens):
        raise ValueError(f"prompt {index} must hold integer token ids, got {tokens[:8]!r}")
    return [int(token) for token in tokens]


def is_conversation(prompt: Any) -> bool:
    """Whether this is a list of {"role", "content"} messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )
