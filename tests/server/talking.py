"""A checkpoint whose chat template has tools and reasoning: the embedded weights with a template of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"
# As Qwen's templates have it, in short.
TEMPLATE = """{%- if tools %}{{- '<|system|>Tools: ' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- ' Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|user|><tool_response>' + message.content + '</tool_response><|end|>' }}
{%- else %}{{- '<|' + message.role + '|>' }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{%- set function = call.function %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' + (function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}{{- '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% if enable_thinking %}{{- '<think>' }}{% endif %}{% endif %}"""


def write_talking(directory: Path, template: str = TEMPLATE) -> None:
    """Write the checkpoint to a directory that does not exist."""
    shutil.copytree(TINY, directory)
    (directory / "chat_template.jinja").write_text(template)
