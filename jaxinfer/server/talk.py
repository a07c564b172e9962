"""How a model talks in one conversation: tools, reasoning, and the parser that finds both in its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError
from jaxinfer.server.harmony_grammar import grammar_of_messages
from jaxinfer.server.parse.formats import HARMONY, THINK, ThinkTags, format_named, format_of
from jaxinfer.server.parse.harmony import HarmonyParser
from jaxinfer.server.parse.machine import Parser
from jaxinfer.server.parse.pieces import AnswerParser
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.sampling import structured_outputs_of
from jaxinfer.server.service import Service
from jaxinfer.server.tools import Tools, schema_of

# Most tokens at a prompt's end in which the tag of reasoning is looked for.
_TAIL = 16


class Talk:
    """Tools and reasoning of one request.

    Raises:
        ApiError: the body asks for what does not go together, or the model has no tool calls.
    """

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self._service, template, settings = service, service.template(), service.settings
        calls = format_named(settings.tool_call_parser) if settings.tool_call_parser else format_of(template)
        self._has_channels = calls is HARMONY
        self.tools = Tools(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls, calls=calls)
        self._think = THINK if settings.reasoning_parser == "think" or THINK.open in template else None
        last = body.messages[-1]
        is_continued = bool(body.continue_final_message) and last.role == "assistant"
        self._continued = last.content if is_continued and isinstance(last.content, str) else ""
        self._answers = structured_outputs_of(body.response_format)
        self._has_grammar = self._answers is not None or bool(body.extra.get("structured_outputs"))

    def parameters(self) -> dict[str, Any]:
        """Sampling parameters that tools need: the tags of calls may be special tokens."""
        found: dict[str, Any] = {}
        if self.tools.are_callable or self._think is not None or self._has_channels:
            found["skip_special_tokens"] = False
        if self.tools.are_callable and self._has_grammar and self._answers is None:
            raise ApiError(400, "tools go without structured_outputs, but with response_format", "structured_outputs")
        grammar = self.tools.grammar(self._answers)
        if self._has_channels and grammar is None and self._answers is not None:
            grammar = grammar_of_messages({}, must_call=False, answer=schema_of(self._answers))
        if grammar is not None:
            found["structured_outputs"] = {"grammar": grammar}
        return found

    def with_reasoning(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """Return parameters whose grammar, if they have one, leaves the answer's reasoning free."""
        think = self._think
        if params.structured_outputs is None or think is None:
            return params
        asked = StructuredOutputsParams.of(params.structured_outputs)
        if asked.reasoning_tags is not None:
            return params
        tail = self._tail(prompt)
        if self._is_thinking(tail, think):
            tags = "", think.close
        elif tail.rstrip().endswith(think.close):
            return params  # the prompt has closed it
        else:
            tags = think.open, think.close
        return replace(params, structured_outputs=replace(asked, reasoning_tags=tags))

    def parser(self, prompt: Sequence[int]) -> Callable[[], AnswerParser] | None:
        """A maker of parsers of answers to a prompt; None: answers are text."""
        think, tools = self._think, self.tools
        if self._has_channels:
            return lambda: HarmonyParser(tools.schemas if tools.are_callable else {}, most_calls=tools.most_calls)
        if not tools.are_callable and think is None:
            return None
        is_thinking = think is not None and self._is_thinking(self._tail(prompt), think)
        return lambda: Parser(
            tools.calls, tools.schemas, think=think, is_thinking=is_thinking, most_calls=tools.most_calls
        )

    def _is_thinking(self, tail: str, think: ThinkTags) -> bool:
        """Whether an answer begins within reasoning: the prompt ends with its tag, or a continued message has it open.

        A tag that a user has written changes nothing.
        """
        continued = self._continued
        return tail.rstrip().endswith(think.open) or continued.rfind(think.open) > continued.rfind(think.close)

    def _tail(self, prompt: Sequence[int]) -> str:
        """The end of a prompt, in which tags of reasoning are looked for."""
        return self._service.llm.get_tokenizer().decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
