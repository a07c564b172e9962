"""Expected answers, of an engine without HTTP: `python -m soaking.offline ASKED ANSWERS`, two files of JSON.

ASKED has `engine`, the arguments of `LLM`, and `requests`, as `soaking.asked` describes them.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.branching.beam_search import BeamSearchParams
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.sampling.noise import gumbel
from soaking.calls import split_calls

# As many as log probabilities are returned of.
_NUM_SCORES = 20
_WORD = 2**32


def main() -> None:
    asked, answers = map(Path, sys.argv[1:])
    given = json.loads(asked.read_text())
    llm = LLM(**given["engine"])
    found = [_CALLS[request["call"]](llm, request) for request in given["requests"]]
    answers.write_text(json.dumps(found))


def answer(llm: LLM, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a conversation, or continue prompts."""
    params = _params(llm, request)
    outputs = llm.generate(_prompts(llm, request), params, use_tqdm=False)
    parts = [(output, part) for output in outputs for part in output.outputs]
    return {str(number): _of_part(llm, request, params, *pair) for number, pair in enumerate(parts)}


def _of_part(
    llm: LLM, request: Mapping[str, Any], params: SamplingParams, output: RequestOutput, part: CompletionOutput
) -> dict[str, Any]:
    surface = request.get("surface", "chat")
    text: str | None = (output.prompt or "") + part.text if request.get("echo") else part.text
    calls: list[dict[str, Any]] | None = []
    if "tools" in request:
        names = [tool["function"]["name"] for tool in request["tools"]]
        most = None if request["is_parallel"] else 1
        text, calls = split_calls(part.text, names, most=most, drops_space=surface != "chat") or (None, None)
    scores = _scores(part, params, output.prompt_token_ids, part.index)
    found = _choice(text, part.token_ids, _reasons(surface, part, calls), scores, calls)
    if surface == "chat" or request.get("has_tokens"):
        return found
    margins = [_margin(entry, str(token)) for entry, token in zip(scores, part.token_ids, strict=True)]
    stream = llm.client.get_tokenizer().stream(output.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
    ends = itertools.accumulate(len(stream.append(token)) for token in part.token_ids)
    return found | {"tokens": None, "scores": [], "margins": margins, "ends": list(ends)}


def _reasons(surface: str, part: CompletionOutput, calls: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """The reasons that are right for an end, in the words of an endpoint; several where the calls are not known."""
    if calls is None:
        known = [_reasons(surface, part, each) for each in ([], [{"is_cut": False}], [{"is_cut": True}])]
        return sorted({reason for reasons in known for reason in reasons})
    is_stopped = isinstance(part.stop_reason, str)
    is_cut = part.finish_reason == "length" or (bool(calls) and calls[-1]["is_cut"] and not is_stopped)
    match surface:
        case "messages":
            ended = "tool_use" if calls else "end_turn"
            return ["max_tokens" if is_cut else f"stop_sequence {part.stop_reason}" if is_stopped else ended]
        case "responses":
            return ["incomplete" if is_cut else "completed"]
        case _:
            cut_within = bool(calls) and calls[-1]["is_cut"]
            return ["length" if is_cut else "stop" if cut_within or not calls else "tool_calls"]


def _margin(scores: Mapping[str, float], token: str) -> float:
    """How near the score of another token is."""
    others = (abs(score - scores[token]) for each, score in scores.items() if each != token)
    return min(others, default=math.inf)


def continued(llm: LLM, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a conversation, and what is asked after its answer. What was asked as the system stays with the first."""
    first = answer(llm, request["first"])
    messages = [message for message in request["first"]["messages"] if message["role"] != "system"]
    messages += [{"role": "assistant", "content": first["0"]["text"]}, *request["then"]["messages"]]
    return {"first": first, "then": answer(llm, request["then"] | {"messages": messages})}


def branches(llm: LLM, request: Mapping[str, Any]) -> dict[str, Any]:
    """Continue one conversation by several suffixes."""
    params, (prompt,) = _params(llm, request), _prompts(llm, request)
    suffixes = [llm.client.get_tokenizer().encode(each, add_special_tokens=False) for each in request["suffixes"]]
    output = llm.generate_branches(prompt, suffixes, params, use_tqdm=False)
    return {
        str(part.index): _choice(
            part.text, part.token_ids, [part.finish_reason],
            _scores(part, params, [*output.prompt_token_ids, *suffixes[part.index]], part.index),
        )
        for part in output.outputs
    }  # fmt: skip


def beams(llm: LLM, request: Mapping[str, Any]) -> dict[str, Any]:
    """Find the best continuations of one prompt."""
    given = request["params"]
    (found,) = llm.beam_search(request["prompts"], BeamSearchParams(given["n"], given["max_tokens"]))
    return {
        str(number): _choice(one.text, one.token_ids, [one.finish_reason], [{} for _ in one.token_ids])
        for number, one in enumerate(found.sequences[: given["n"]])
    }


def skeleton(llm: LLM, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer by a skeleton and its points. Their tokens are not in answers."""
    question = request["messages"][0]["content"]
    found = llm.skeleton_of_thought(question, llm.default_sampling_params(**request["params"]))
    points = {str(point.id): _choice(point.text, None, [point.finish_reason, "stop"]) for point in found.points}
    return {"None": _choice(found.written, None, ["stop"])} | points


_CALLS = {"answer": answer, "branches": branches, "beams": beams, "skeleton": skeleton, "continued": continued}


def _choice(
    text: str | None,
    tokens: Sequence[int] | None,
    reasons: Sequence[str | None],
    scores: Sequence[Any] = (),
    calls: Sequence[Mapping[str, Any]] | None = (),
) -> dict[str, Any]:
    return {
        "text": text, "tokens": None if tokens is None else list(tokens), "finish_reasons": list(reasons),
        "scores": list(scores), "calls": None if calls is None else list(calls), "margins": [], "ends": [],
    }  # fmt: skip


def _params(llm: LLM, request: Mapping[str, Any]) -> SamplingParams:
    given: dict[str, Any] = {**request["params"], "logprobs": _NUM_SCORES}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): added for token, added in given["logit_bias"].items()}
    if "tools" in request:
        given["skip_special_tokens"] = False
        grammar = _grammar_of_tools(llm, request)
        if grammar is not None:
            given["structured_outputs"] = {"grammar": grammar}
    return llm.default_sampling_params(**given)


def _grammar_of_tools(llm: LLM, request: Mapping[str, Any]) -> str | None:
    """The grammar that a server holds calls to: an engine knows nothing of tools."""
    from jaxinfer.server.parse.formats import format_of
    from jaxinfer.server.protocol.tools import Tool
    from jaxinfer.server.tools import Tools

    tools = [Tool.model_validate(each) for each in request["tools"]]
    calls = format_of(str(llm.client.get_tokenizer().hf.chat_template))
    return Tools(tools, request["tool_choice"], is_parallel=request["is_parallel"], calls=calls).grammar()


def _prompts(llm: LLM, request: Mapping[str, Any]) -> list[Any]:
    if "prompts" in request:
        return list(request["prompts"])
    more = {"tools": request["tools"]} if "tools" in request else {}
    return [llm.client.inputs.render([_read(message) for message in request["messages"]], 0, more)]


def _read(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it: arguments of its calls are objects."""
    if "tool_calls" not in message:
        return dict(message)
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [
        {"type": "function", "function": each | {"arguments": json.loads(each["arguments"])}} for each in functions
    ]
    return {**message, "tool_calls": calls}


def _scores(
    part: CompletionOutput, params: SamplingParams, prompt: Sequence[int], index: int
) -> list[dict[str, float]]:
    """For each token, what the engine compares of the best ones in its place: logits with adjustments and noise.

    Log probabilities are logits but for a number that is the same for all, and noise is a function of seed, position
    and token.
    """
    key = jnp.array(divmod(((params.seed or 0) + index) % 2**64, _WORD), jnp.uint32)
    found: list[dict[str, float]] = []
    counts: dict[int, int] = {}
    for place, (token, entry) in enumerate(zip(part.token_ids, part.logprobs or (), strict=True)):
        tokens = np.array(list(entry), np.int32)
        scores = np.array([each.logprob for each in entry.values()])
        for number, each in enumerate(tokens.tolist()):
            scores[number] += (params.logit_bias or {}).get(each, 0.0)
            count = counts.get(each, 0)
            scores[number] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if params.temperature:
            noise = gumbel(key, jnp.asarray(len(prompt) + place), jnp.asarray(tokens))
            scores += params.temperature * np.asarray(noise, np.float64)
        found.append({str(each): float(score) for each, score in zip(tokens, scores, strict=True)})
        counts[token] = counts.get(token, 0) + 1
    return found


if __name__ == "__main__":
    main()
