"""The embedded checkpoint with a chat template that has tools."""

from __future__ import annotations

import shutil
from pathlib import Path

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
NAME = "tiny"
# Turns are as the embedded template writes them; tools and calls are as Qwen's templates have them.
TEMPLATE = """{%- if tools -%}{{- '<|system|>Call one of' -}}
{%- for tool in tools -%}{{- ' ' + (tool.function | tojson) -}}{%- endfor -%}
{{- ' by <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|' + ('user' if message.role == 'tool' else message.role) + '|>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' -}}
{{- '</tool_call>' -}}{%- endfor -%}{{- '<|end|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def write_model(folder: Path) -> Path:
    """Write the checkpoint into a new directory below `folder`; returns that directory."""
    directory = folder / NAME
    shutil.copytree(CHECKPOINTS / NAME, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory
