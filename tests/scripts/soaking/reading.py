"""Events of answers, as tests write them."""

import json

from soaking.answers import READERS
from soaking.choices import Answer, Reader

ITEM = {"id": "m", "type": "message", "role": "assistant"}
CALL = {"id": "f", "type": "function_call", "call_id": "c", "name": "now"}


def chunk(*choices, **more):
    return {"choices": list(choices), **more}


def delta(index=0, reason=None, tokens=(), **fields):
    return {"index": index, "delta": fields, "finish_reason": reason, "token_ids": list(tokens)}


def read(path: str, events) -> Reader:
    """What has read all events of an answer."""
    reader = READERS[path]()
    for each in events:
        reader.add(each if isinstance(each, str) else json.dumps(each))
    return reader


def read_whole(path: str, body) -> Answer:
    reader = READERS[path]()
    reader.read_whole(body)
    return reader.answer


def message_events():
    """A message of a text and a call."""
    begun = {"type": "message", "role": "assistant", "content": [], "stop_reason": None}
    use = {"type": "tool_use", "id": "t", "name": "describe", "input": {}}
    return [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I "}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "look."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": use},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"age": '}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "3}"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}},
        {"type": "message_stop"},
    ]


def response(status, *items, **more):
    return {"id": "r", "status": status, "error": None, "output": list(items), **more}


def text_item(text, tokens=()):
    logprobs = [{"token": f"token_id:{token}"} for token in tokens]
    return ITEM | {"content": [{"type": "output_text", "text": text, "logprobs": logprobs}]}


def call_item(arguments):
    return CALL | {"arguments": arguments}


def response_events():
    """A response of a text and a call."""
    text, call = text_item("ab", [5, 6]), call_item("{}")
    of_text = {"item_id": "m", "output_index": 0, "content_index": 0}
    of_call = {"item_id": "f", "output_index": 1}
    events = [
        {"type": "created", "response": response("in_progress")},
        {"type": "in_progress", "response": response("in_progress")},
        {"type": "output_item.added", "output_index": 0, "item": ITEM | {"content": []}},
        {"type": "content_part.added", **of_text, "part": {"type": "output_text", "text": ""}},
        {"type": "output_text.delta", **of_text, "delta": "a"},
        {"type": "output_text.delta", **of_text, "delta": "b"},
        {"type": "output_text.done", **of_text, "text": "ab"},
        {"type": "content_part.done", **of_text, "part": text["content"][0]},
        {"type": "output_item.done", "output_index": 0, "item": text},
        {"type": "output_item.added", "output_index": 1, "item": call_item("")},
        {"type": "function_call_arguments.delta", **of_call, "delta": "{}"},
        {"type": "function_call_arguments.done", **of_call, "arguments": "{}"},
        {"type": "output_item.done", "output_index": 1, "item": call},
        {"type": "completed", "response": response("completed", text, call)},
    ]
    return numbered(events)


def numbered(events):
    """Events of a response with their names and numbers."""
    return [
        {**each, "type": f"response.{each['type'].removeprefix('response.')}", "sequence_number": number}
        for number, each in enumerate(events)
    ]
