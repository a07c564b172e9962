"""Formats of tool calls and reasoning, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkTags:
    """Tags around reasoning.

    Attributes:
        call_ends_it: whether a tool call ends reasoning that was not closed.
    """

    open: str = "<think>"
    close: str = "</think>"
    call_ends_it: bool = False


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes tool calls.

    Attributes:
        name: of the option `--tool-call-parser`.
        open, close: markers around calls; an empty `open`: a call is the whole answer, from its first character on.
        body: "json" (an object with a name and arguments), "array" (of such objects), "xml" (tags for the function and
            for each parameter) or "messages" (each with a channel).
        separator: between calls within one pair of markers.
        bare_open: a marker with which a call may begin without `open`.
        in_templates: what the chat templates of these models contain.
    """

    name: str
    open: str
    close: str
    body: str
    separator: str = ""
    bare_open: str = ""
    in_templates: tuple[str, ...] = ()


THINK = ThinkTags()
FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_PARAMETER, END_OF_FUNCTION = "</parameter>", "</function>"

# In the order in which templates are looked through: the more special ones first.
FORMATS = {
    each.name: each
    for each in (
        CallFormat(
            "qwen3_coder", "<tool_call>", "</tool_call>", "xml", bare_open=FUNCTION,
            in_templates=("<function=", "<parameter="),
        ),
        CallFormat("smollm2", "<tool_call>", "</tool_call>", "array", in_templates=("<tool_call>[",)),
        CallFormat("hermes", "<tool_call>", "</tool_call>", "json", in_templates=("<tool_call>",)),
        CallFormat(
            "llama3_json", "", "", "json", separator=";", bare_open="<|python_tag|>",
            in_templates=('"parameters"', "<|python_tag|>"),
        ),
    )
}  # fmt: skip


# gpt-oss's messages by channels, which carry reasoning and calls; see `parse.harmony` and `harmony_grammar`.
HARMONY = CallFormat("harmony", "", "", "messages", in_templates=("<|channel|>", "<|message|>", "<|start|>"))


def format_named(name: str) -> CallFormat:
    """The format of a name of `--tool-call-parser`."""
    return HARMONY if name == HARMONY.name else FORMATS[name]


def format_of(template: str) -> CallFormat | None:
    """The format of the calls that a chat template asks for; None: it has none that is known."""
    for each in (HARMONY, *FORMATS.values()):
        if all(marker in template for marker in each.in_templates):
            return each
    return None
