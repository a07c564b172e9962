"""How a model talks in one conversation: tools, reasoning, and the parser that finds both in its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.server.errors import ApiError
from jaxinfer.server.parse.formats import FORMATS, THINK, format_of
from jaxinfer.server.parse.machine import Parser
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.service import Service
from jaxinfer.server.tools import Tools

# Most tokens at a prompt's end in which the tag of reasoning is looked for.
_TAIL = 16


class Talk:
    """Tools and reasoning of one request.

    Raises:
        ApiError: the body asks for what does not go together, or the model has no tool calls.
    """

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self._service, template, settings = service, service.template(), service.settings
        calls = FORMATS[settings.tool_call_parser] if settings.tool_call_parser else format_of(template)
        self.tools = Tools(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls, calls=calls)
        self._think = THINK if settings.reasoning_parser == "think" or THINK.open in template else None
        self._has_grammar = body.response_format is not None or bool(body.extra.get("structured_outputs"))

    def parameters(self) -> dict[str, Any]:
        """Sampling parameters that tools need: the tags of calls may be special tokens."""
        found: dict[str, Any] = {}
        if self.tools.are_callable or self._think is not None:
            found["skip_special_tokens"] = False
        grammar = self.tools.grammar()
        if grammar is not None:
            if self._has_grammar:
                raise ApiError(400, "a tool that has to be called goes without response_format", "tool_choice")
            found["structured_outputs"] = {"grammar": grammar}
        return found

    def parser(self, prompt: Sequence[int]) -> Callable[[], Parser] | None:
        """A maker of parsers of answers to a prompt; None: answers are text."""
        if not self.tools.are_callable and self._think is None:
            return None
        is_thinking = False
        if self._think is not None:
            tail = self._service.llm.get_tokenizer().decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
            is_thinking = tail.rfind(self._think.open) > tail.rfind(self._think.close)
        tools = self.tools
        return lambda: Parser(
            tools.calls, tools.schemas, think=self._think, is_thinking=is_thinking, most_calls=tools.most_calls
        )
