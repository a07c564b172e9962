"""The embedded checkpoint, with a chat template that has tools."""

from __future__ import annotations

import shutil
from pathlib import Path

EMBEDDED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"
_TEMPLATE = "chat_template.jinja"
_CALL = "<tool_call>"
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


def model_with_tools(folder: Path, checkpoint: Path = EMBEDDED) -> Path:
    """A directory of the checkpoint with tools: its own if its template has them, else a copy below `folder`."""
    if _CALL in (checkpoint / _TEMPLATE).read_text(encoding="utf-8"):
        return checkpoint
    directory = folder / checkpoint.name
    shutil.copytree(checkpoint, directory)
    (directory / _TEMPLATE).write_text(TEMPLATE, encoding="utf-8")
    return directory
