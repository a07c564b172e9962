"""The embedded tokenizer and checkpoint, whose special tokens have the names of harmony's markers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import tokenizers

from tests.server.talking import TINY

RENAMED = {
    "<|end|>": "<|return|>", "<|system|>": "<|end|>", "<|user|>": "<|call|>", "<|assistant|>": "<|start|>",
    "[PLAN]": "<|channel|>", "[DIRECT]": "<|message|>", "[ANSWER]": "<|constrain|>",
}  # fmt: skip
ENDS = ("<|return|>", "<|call|>")
# As gpt-oss's has it, in short.
TEMPLATE = """{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' }}
{{- message.content + '<|end|>' }}
{%- elif message.tool_calls %}{%- set function = message.tool_calls[0].function %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + function.name + ' <|constrain|>json<|message|>' }}
{{- (function.arguments | tojson) + '<|call|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""


@functools.cache
def renamed_json() -> str:
    text = (TINY / "tokenizer.json").read_text(encoding="utf-8")
    for number, old in enumerate(RENAMED):
        text = text.replace(f'"{old}"', f'"\x01{number}"')
    for number, new in enumerate(RENAMED.values()):
        text = text.replace(f'"\x01{number}"', f'"{new}"')
    found = tokenizers.Tokenizer.from_str(text)
    found.add_special_tokens(list(RENAMED.values()))
    return found.to_str()


def token_of(marker: str) -> int:
    return tokenizers.Tokenizer.from_str(renamed_json()).token_to_id(marker)


def write_with_channels(directory: Path) -> None:
    """Write the checkpoint to a directory that does not exist."""
    shutil.copytree(TINY, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "tokenizer.json").write_text(renamed_json(), encoding="utf-8")
    for name, change in (
        ("tokenizer_config.json", {"eos_token": ENDS[0], "extra_special_tokens": list(RENAMED.values())}),
        ("generation_config.json", {"eos_token_id": [token_of(end) for end in ENDS]}),
    ):
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
