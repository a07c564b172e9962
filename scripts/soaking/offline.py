"""Expected answers, of an engine without HTTP: `python -m soaking.offline ASKED ANSWERS`, two files of JSON.

ASKED has `engine`, the arguments of `LLM`, and `requests`, as `soaking.requests` describes them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.branching.beam_search import BeamSearchParams
from jaxinfer.outputs import CompletionOutput
from jaxinfer.sampling.noise import gumbel

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
    found: dict[str, Any] = {}
    for output in outputs:
        for part in output.outputs:
            text: str | None = (output.prompt or "") + part.text if request.get("echo") else part.text
            reasons = [part.finish_reason]
            if "tools" in request:
                text, reasons = None, [*reasons, "tool_calls"] if part.finish_reason == "stop" else reasons
            scores = _scores(part, params, output.prompt_token_ids, part.index)
            found[str(len(found))] = _choice(text, part.token_ids, reasons, scores)
    return found


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


_CALLS = {"answer": answer, "branches": branches, "beams": beams, "skeleton": skeleton}


def _choice(
    text: str | None, tokens: Sequence[int] | None, reasons: Sequence[str | None], scores: Sequence[Any] = ()
) -> dict[str, Any]:
    return {
        "text": text, "tokens": None if tokens is None else list(tokens), "finish_reasons": list(reasons),
        "scores": list(scores),
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
    return Tools(tools, request["tool_choice"], is_parallel=False, calls=calls).grammar()


def _prompts(llm: LLM, request: Mapping[str, Any]) -> list[Any]:
    if "prompts" in request:
        return list(request["prompts"])
    more = {"tools": request["tools"]} if "tools" in request else {}
    return [llm.client.inputs.render(request["messages"], 0, more)]


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
