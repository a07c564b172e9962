"""Sampling parameters from the fields of a body, and fields that are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError
from jaxinfer.server.protocol.common import MOST_STOP_STRINGS, RequestBody, Sampling

# Their cost is the engine's, for every token.
MOST_STOP_CHARACTERS, MOST_BAD_WORDS = 1024, 1024
_OWN = frozenset(field.name for field in fields(SamplingParams) if field.init)
# Of the fields of `Sampling`, those that are sampling parameters under the same name.
_SAME = (
    "n", "seed", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty", "prompt_logprobs",
    "return_token_sources", "return_blocks",
)  # fmt: skip

_STRUCTURED = "use structured_outputs"
# Fields that would change the result, and are not computed. A value that asks for nothing passes.
_REFUSED: dict[str, str] = {
    "guided_json": f"{_STRUCTURED}={{'json': ...}} or response_format",
    "guided_regex": f"{_STRUCTURED}={{'regex': ...}}",
    "guided_choice": f"{_STRUCTURED}={{'choice': [...]}}",
    "guided_grammar": f"{_STRUCTURED}={{'grammar': ...}}",
    "guided_decoding_backend": "there is one backend",
    "guided_whitespace_pattern": f"{_STRUCTURED}={{..., 'whitespace_pattern': ...}}",
    "regex": f"{_STRUCTURED}={{'regex': ...}}",
    "ebnf": f"{_STRUCTURED}={{'grammar': ...}} with a Lark grammar",
    "json_schema": f"{_STRUCTURED}={{'json': ...}}",
    "structural_tag": "structural tags are not served",
    "suffix": "text cannot be inserted before a suffix",
    "audio": "there is no audio",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prediction": "predicted outputs are not served",
    "web_search_options": "there is no search",
    "logits_processors": "code from a request is not run",
    "vllm_xargs": "there are no arguments of other engines",
    "thinking_token_budget": "budgets of thinking are not served",
    "repetition_detection": "repetition is not looked for",
    "kv_transfer_params": "KV is not sent to other processes",
    "logprob_token_ids": "log probabilities are those of the most likely tokens",
    "truncate_prompt_tokens": "prompts are not cut",
    "chat_template": "templates in a request are not run: the model's own is",
    "modalities": "answers are text",
    "no_stop_trim": "use include_stop_str_in_output",
    "separate_reasoning": "reasoning is always apart from the content",
}
# Values of these fields that ask for what is done in any case.
_DONE: dict[str, Any] = {"modalities": ["text"], "separate_reasoning": True, "best_of": 1}


def refuse_uncomputed(body: RequestBody, *more: tuple[str, str]) -> None:
    """Raise ApiError, naming the field, if the body asks for what is not computed.

    Args:
        more: further fields of the endpoint, each with what to do instead.
    """
    given = {**body.extra, **{name: getattr(body, name) for name in type(body).model_fields}}
    for name, instead in (*_REFUSED.items(), *more):
        value = given.get(name)
        if name in _DONE and value == _DONE[name]:
            continue
        if not (value is None or (value is False and name not in _DONE) or value in ("", [], {})):
            raise ApiError(400, f"{name} is not served: {instead}", param=name)


def sampling_params(body: Sampling, default: Callable[..., SamplingParams], most: int, **own: Any) -> SamplingParams:
    """The parameters of a request.

    Args:
        default: returns the given parameters with the checkpoint's defaults.
        most: greatest n.
        own: parameters of the endpoint, which go before the body's.

    Raises:
        ApiError: a field cannot be served.
        ValueError: a parameter is out of range; the message begins with its name.
    """
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    given |= {name: value for name, value in body.extra.items() if name in _OWN and value is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = _bias(body.logit_bias)
    stops = body.stop if isinstance(body.stop, list) else [body.stop or ""]
    if len(stops) > MOST_STOP_STRINGS:
        raise ApiError(400, f"stop has {len(stops)} strings, at most {MOST_STOP_STRINGS} are allowed", "stop")
    if any(len(stop) > MOST_STOP_CHARACTERS for stop in stops):
        raise ApiError(400, f"strings of stop must have at most {MOST_STOP_CHARACTERS} characters", "stop")
    if len(given.get("bad_words") or ()) > MOST_BAD_WORDS:
        raise ApiError(400, f"bad_words must have at most {MOST_BAD_WORDS} words", "bad_words")
    if body.n is not None and body.n > most:
        raise ApiError(400, f"n={body.n} is more than this engine runs at once ({most})", "n")
    given |= own
    asked = structured_outputs_of(body.response_format)
    if asked is not None and "structured_outputs" not in own:  # the grammar of tools has that of answers too
        if given.get("structured_outputs"):
            raise ApiError(400, "response_format and structured_outputs exclude each other", "response_format")
        given["structured_outputs"] = asked
    structured = given.get("structured_outputs")
    if isinstance(structured, Mapping):
        given["structured_outputs"] = {name: value for name, value in structured.items() if value is not None}
    return default(**given)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): added for token, added in given.items()}
    except ValueError as error:
        raise ApiError(400, "logit_bias must map token ids to numbers", "logit_bias") from error


def structured_outputs_of(given: Any) -> dict[str, Any] | None:
    """What a `response_format` asks for, as `SamplingParams.structured_outputs` has it; schemas are always kept to.

    Raises:
        ApiError: the schema is missing.
    """
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        schema = given.model_extra.get("schema") if given.model_extra else None
        return {"json_object": True} if schema is None else {"json": schema}
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise ApiError(400, "response_format of the type json_schema needs json_schema.schema", "response_format")
    return {"json": given.json_schema.schema_}
