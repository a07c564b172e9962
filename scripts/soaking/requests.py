"""Kinds of requests, and the distinct ones of a soak."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from soaking.answers import COMPLETIONS, CONVERSATIONS
from soaking.asked import Asked, Kind, Request
from soaking.surfaces import as_message, as_response

MOST_DISTINCT = 200
_THINGS = (
    "lamp", "boat", "drum", "garden", "bicycle", "kettle", "harbour", "letter", "clock", "bridge", "bread", "story",
)  # fmt: skip
_VERBS = ("mend", "paint", "find", "clean", "build", "carry", "draw", "sell", "move", "open")
_SYSTEM = " ".join(f"You know how to {verb} a {thing}." for verb in _VERBS for thing in _THINGS[:4])
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "describe", "description": "a person", "parameters": _SCHEMA}},
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]


def _question(rng: random.Random) -> str:
    return f"How do I {rng.choice(_VERBS)} a {rng.choice(_THINGS)} and a {rng.choice(_THINGS)}?"


def _messages(rng: random.Random) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": _question(rng)}]
    if rng.random() < 0.3:
        turns = [*turns, {"role": "assistant", "content": "Slowly."}, {"role": "user", "content": _question(rng)}]
    return turns


def _messages_with_call(rng: random.Random) -> list[dict[str, Any]]:
    """Messages that end with the result of a call."""
    name = rng.choice(("Ann", "Bo", "Zo\u00eb"))
    arguments = json.dumps({"name": name, "age": rng.randrange(100)}, ensure_ascii=False)
    call = {"id": "call_1", "type": "function", "function": {"name": "describe", "arguments": arguments}}
    return [
        {"role": "user", "content": _question(rng)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": f"{name} can {rng.choice(_VERBS)} a lamp."},
    ]


def _sampled(rng: random.Random, longest: int = 40) -> dict[str, Any]:
    return {
        "temperature": rng.choice((0.6, 1.0)), "top_p": 1.0, "seed": rng.randrange(1 << 40), "ignore_eos": True,
        "max_tokens": rng.randint(6, longest),
    }  # fmt: skip


def _greedy(rng: random.Random, longest: int = 40) -> dict[str, Any]:
    return {"temperature": 0.0, "ignore_eos": rng.random() < 0.7, "max_tokens": rng.randint(6, longest)}


def _either(rng: random.Random) -> dict[str, Any]:
    return (_sampled if rng.random() < 0.5 else _greedy)(rng)


def _chat(messages: list[dict[str, Any]], params: dict[str, Any], *, may_stream: bool = True, **of_http: Any) -> Asked:
    """A conversation; parameters have the same names on both sides, `of_http` is for HTTP alone."""
    body = {"messages": messages, **params, "return_token_ids": True, **of_http}
    return Asked(CONVERSATIONS, body, {"call": "answer", "messages": messages, "params": params}, may_stream)


def _completion(prompts: list[str], params: dict[str, Any], *, may_stream: bool = True, **of_http: Any) -> Asked:
    body = {"prompt": prompts, **params, "return_token_ids": True, **of_http}
    return Asked(COMPLETIONS, body, {"call": "answer", "prompts": prompts, "params": params}, may_stream)


def _chat_with_history(rng: random.Random) -> Asked:
    return _chat(_messages(rng), _either(rng))


def _chat_with_shared_beginning(rng: random.Random) -> Asked:
    return _chat([{"role": "system", "content": _SYSTEM}, *_messages(rng)], _either(rng))


def _chat_with_long_prompt(rng: random.Random) -> Asked:
    text = " ".join(_question(rng) for _ in range(rng.randint(25, 38)))
    return _chat([{"role": "user", "content": text}], _either(rng))


def _chat_with_samples(rng: random.Random) -> Asked:
    return _chat(_messages(rng), _sampled(rng, 20) | {"n": rng.randint(2, 4)})


def _chat_with_logprobs(rng: random.Random) -> Asked:
    count = rng.randint(0, 5)
    found = _chat(_messages(rng), _either(rng) | {"logprobs": count})
    return found._replace(body=found.body | {"logprobs": True, "top_logprobs": count})


def _chat_with_adjustments(rng: random.Random) -> Asked:
    params = _greedy(rng) | {"presence_penalty": 0.7, "frequency_penalty": 0.4, "stop": [" the", "zz"]}
    params |= {"min_tokens": 3, "bad_words": ["lamp"]}
    bias = {str(rng.randrange(100, 2000)): 3.0 for _ in range(3)}
    found = _chat(_messages(rng), params)
    offline = found.offline | {"params": params | {"logit_bias": bias}}
    return found._replace(body=found.body | {"logit_bias": bias}, offline=offline)


def _chat_with_schema(rng: random.Random) -> Asked:
    found = _chat(_messages(rng), _greedy(rng) | {"ignore_eos": False, "max_tokens": 60})
    offline = found.offline | {"params": found.offline["params"] | {"structured_outputs": {"json": _SCHEMA}}}
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA, "strict": True}}
    return found._replace(body=found.body | {"response_format": asked}, offline=offline)


def _chat_with_tools(rng: random.Random) -> Asked:
    choice, is_parallel = rng.choice(("auto", "required", "required")), rng.random() < 0.3
    params = _sampled(rng) | {"ignore_eos": False, "max_tokens": 80}
    messages = (_messages if rng.random() < 0.6 else _messages_with_call)(rng)
    found = _chat(messages, params, tools=TOOLS, tool_choice=choice, parallel_tool_calls=is_parallel)
    return found._replace(offline=found.offline | {"tools": TOOLS, "tool_choice": choice, "is_parallel": is_parallel})


def _chat_with_stop_strings(rng: random.Random) -> Asked:
    return _chat(_messages(rng), _either(rng) | {"stop": [" the", ".", "zz"]})


def _chat_in_branches(rng: random.Random) -> Asked:
    suffixes = [f" {thing}" for thing in rng.sample(_THINGS, rng.randint(2, 3))]
    found = _chat(_messages(rng), _either(rng), branches=suffixes)
    return found._replace(offline=found.offline | {"call": "branches", "suffixes": suffixes})


def _chat_with_skeleton(rng: random.Random) -> Asked:
    messages = [{"role": "user", "content": f"Make a plan: {rng.choice(_VERBS)} a {rng.choice(_THINGS)}."}]
    params = {"temperature": 0.0, "max_tokens": 24}
    found = _chat(messages, params, skeleton_of_thought=True)
    body = {name: value for name, value in found.body.items() if name != "return_token_ids"}  # which it has not
    return found._replace(body=body, offline=found.offline | {"call": "skeleton"})


def _completion_of_texts(rng: random.Random) -> Asked:
    return _completion([_question(rng) for _ in range(rng.choice((1, 1, 1, 3)))], _either(rng))


def _completion_with_echo(rng: random.Random) -> Asked:
    params = _greedy(rng) | {"logprobs": 2, "prompt_logprobs": 2}
    found = _completion([_question(rng)], params, echo=True)
    body = {name: value for name, value in found.body.items() if name != "prompt_logprobs"}
    return found._replace(body=body, offline=found.offline | {"echo": True})


def _completion_of_regex(rng: random.Random) -> Asked:
    params = _sampled(rng) | {
        "ignore_eos": False,
        "structured_outputs": {"regex": "(red|blue|green)( [a-z]{2,6}){1,4}"},
    }
    return _completion([_question(rng)], params | {"max_tokens": 50})


def _completion_of_kept_tokens(rng: random.Random) -> Asked:
    params = _sampled(rng) | rng.choice(({"top_k": 8}, {"min_p": 0.1}, {"allowed_token_ids": list(range(100, 400))}))
    return _completion([_question(rng)], params)


def _completion_with_prompt_logprobs(rng: random.Random) -> Asked:
    return _completion([_question(rng)], _greedy(rng) | {"prompt_logprobs": 1}, may_stream=False)


def _completion_by_beams(rng: random.Random) -> Asked:
    params = {"temperature": 0.0, "max_tokens": rng.randint(4, 12), "n": 3}
    found = _completion([_question(rng)], params, may_stream=False, use_beam_search=True)
    return found._replace(offline=found.offline | {"call": "beams"})


def _message(make: Callable[[random.Random], Asked]) -> Callable[[random.Random], Asked]:
    return lambda rng: as_message(make(rng))


def _response(make: Callable[[random.Random], Asked], *, with_tokens: bool = False) -> Callable[[random.Random], Asked]:
    return lambda rng: as_response(make(rng), is_stored=rng.random() < 0.5, with_tokens=with_tokens)


def _continued_response(rng: random.Random) -> Asked:
    """A response that is remembered, and one that continues it, for which the first one's instructions do not hold."""
    first = as_response(rng.choice((_chat_with_history, _chat_with_shared_beginning))(rng), with_tokens=True)
    then = as_response(_chat([{"role": "user", "content": _question(rng)}], _either(rng)), with_tokens=True)
    offline = {"call": "continued", "first": first.offline, "then": then.offline}
    return first._replace(offline=offline, then=then.body)


# A further endpoint is entries here, a reader in `soaking.answers`, and a translation in `soaking.surfaces`.
KINDS = (
    Kind("conversation", 20, _chat_with_history),
    Kind("shared beginning", 8, _chat_with_shared_beginning),
    Kind("long prompt", 6, _chat_with_long_prompt),
    Kind("samples", 5, _chat_with_samples),
    Kind("log probabilities", 5, _chat_with_logprobs),
    Kind("adjusted", 6, _chat_with_adjustments),
    Kind("schema", 5, _chat_with_schema),
    Kind("tools", 8, _chat_with_tools),
    Kind("branches", 4, _chat_in_branches),
    Kind("skeleton", 2, _chat_with_skeleton),
    Kind("completion", 12, _completion_of_texts),
    Kind("echo", 4, _completion_with_echo),
    Kind("regular expression", 4, _completion_of_regex),
    Kind("kept tokens", 5, _completion_of_kept_tokens),
    Kind("prompt log probabilities", 3, _completion_with_prompt_logprobs),
    Kind("beams", 3, _completion_by_beams),
    Kind("message", 8, _message(_chat_with_history)),
    Kind("message with a shared beginning", 4, _message(_chat_with_shared_beginning)),
    Kind("message with a long prompt", 2, _message(_chat_with_long_prompt)),
    Kind("message with stop sequences", 4, _message(_chat_with_stop_strings)),
    Kind("message with a schema", 3, _message(_chat_with_schema)),
    Kind("message with tools", 6, _message(_chat_with_tools)),
    Kind("response", 6, _response(_chat_with_history)),
    Kind("response with a shared beginning", 4, _response(_chat_with_shared_beginning)),
    Kind("response with a long prompt", 2, _response(_chat_with_long_prompt)),
    Kind("response with stop strings", 3, _response(_chat_with_stop_strings)),
    Kind("response with a schema", 3, _response(_chat_with_schema)),
    Kind("response with tools", 6, _response(_chat_with_tools)),
    Kind("response with log probabilities", 4, _response(_chat_with_history, with_tokens=True)),
    Kind("continued response", 6, _continued_response, has_manner=True),
)


def distinct_requests(count: int, seed: int) -> list[Request]:
    """Make so many requests, of all kinds as often as their weights say.

    Raises:
        ValueError: `count` is less than the number of kinds, or more than are computed in reasonable time.
    """
    if not len(KINDS) <= count <= MOST_DISTINCT:
        raise ValueError(f"the number of distinct requests must be in {len(KINDS)}..{MOST_DISTINCT}, got {count}")
    rng = random.Random(seed)
    kinds = [*KINDS, *rng.choices(KINDS, [kind.weight for kind in KINDS], k=count - len(KINDS))]
    return [Request(number, kind.name, kind.make(rng)) for number, kind in enumerate(kinds)]
