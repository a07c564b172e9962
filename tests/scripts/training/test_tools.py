"""Conversations with tools in the tiny corpus: written as the chat template writes them, right, and split by tools."""

import itertools
import json
import random

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.server.parse.formats import format_of
from training.corpus import MIXTURE, TOOLS, held_out_cases, held_out_conversations, stream
from training.inventory import is_held_out
from training.tokenizer import CHAT_TEMPLATE, ROLES, encode_document, load_tokenizer, render
from training.tool_format import HERMES, TOOL_CHAT_TEMPLATE, calls_in, knows_tools, turns_of
from training.toolbox import make_tool, purposes

CALLING = ("tool_call", "tool_bare", "tool_calls", "tool_chain")
CONTEXT = 1024


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The embedded tokenizer with the chat template that a training on tools installs."""
    found = load_tokenizer(embedded_checkpoint())
    found.chat_template = TOOL_CHAT_TEMPLATE
    return found


def samples(count: int = 600, seed: int = 7, held_out: bool = False) -> list:
    return list(itertools.islice(stream(seed, held_out, TOOLS), count))


def written(sample) -> list:
    """All calls that a sample's assistant writes, by the server's parser."""
    turns = [turn["content"] for turn in sample.messages if turn["role"] == "assistant"]
    return [call for turn in turns for call in calls_in(sample.talk.tools, turn)[1]]


def test_the_same_seed_gives_the_same_conversations():
    assert samples(200, seed=3) == samples(200, seed=3) != samples(200, seed=4)


def test_there_are_a_few_hundred_tools_and_a_tenth_is_held_out():
    training, held_out = ({each.key for each in purposes(side)} for side in (False, True))
    assert 300 < len(training) < 500 and 30 < len(held_out) < 60
    assert not training & held_out


def test_training_never_shows_a_held_out_tool():
    names = {
        side: {tool["function"]["name"] for sample in samples(1500, held_out=side) for tool in sample.talk.tools}
        for side in (False, True)
    }
    assert len(names[False]) > 400 and len(names[True]) > 100
    assert not names[False] & names[True]


def test_a_tool_is_from_the_side_of_its_purpose_in_every_spelling():
    rng = random.Random(0)
    for held_out in (False, True):
        for purpose in purposes(held_out):
            assert is_held_out(purpose.key) is held_out
            assert make_tool(rng, held_out, purpose).purpose is purpose


def test_tools_of_a_conversation_are_one_to_four_and_differ():
    sizes = set()
    for sample in samples():
        names = [tool["function"]["name"] for tool in sample.talk.tools]
        assert len(set(names)) == len(names)
        sizes.add(len(names))
    assert sizes == {1, 2, 3, 4}


def test_every_call_is_read_by_the_servers_parser_and_keeps_to_its_tools_schema():
    calls = 0
    for sample in samples(1200):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.talk.tools}
        asked = [
            (call["function"]["name"], call["function"]["arguments"])
            for message in sample.talk.messages
            for call in message.get("tool_calls", ())
        ]
        assert written(sample) == asked
        for name, arguments in asked:
            jsonschema.validate(arguments, {**schemas[name], "additionalProperties": False})
            calls += 1
    assert calls > 1000


def test_every_type_of_parameter_occurs_required_and_optional():
    seen = set()
    for sample in samples(1500):
        for tool in sample.talk.tools:
            schema = tool["function"]["parameters"]
            for key, inner in schema["properties"].items():
                kind = "enum" if "enum" in inner else inner["type"]
                seen.add((kind, key in schema.get("required", ())))
    kinds = {kind for kind, _ in seen}
    assert kinds == {"string", "enum", "integer", "number", "boolean", "array"}
    assert {kind for kind, is_required in seen if is_required} >= {"string", "enum", "integer", "number", "array"}
    assert {kind for kind, is_required in seen if not is_required} == kinds


def test_arguments_are_in_the_conversation_before_the_call():
    for kind in ("tool_call", "tool_calls", "tool_chain"):
        for sample in held_out_cases(kind, 100):
            prompt = "\n".join(turn["content"] for turn in sample.prompt)
            for _, arguments in calls_in(sample.talk.tools, sample.answer)[1]:
                for value in arguments.values():
                    words = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
                    assert all(str(word) in prompt for word in words), (prompt, arguments)


def test_no_two_tools_of_a_conversation_answer_the_same_question():
    questions = {each.question.told for each in purposes(False) if each.question is not None}
    compared = 0
    for sample in samples():
        descriptions = [tool["function"]["description"].removesuffix(".") for tool in sample.talk.tools]
        told = [question for question in questions for each in descriptions if each.endswith(f" {question}")]
        assert len(set(told)) == len(told)
        compared += len(told) > 1
    assert compared > 100


def test_kinds_end_with_what_they_are_named_for():
    for sample in samples(1000):
        if sample.kind == "tool_series":
            continue
        text, calls = calls_in(sample.talk.tools, sample.answer)
        expected = {"tool_call": 1, "tool_bare": 1, "tool_calls": 2, "tool_chain": 1}.get(sample.kind, 0)
        assert len(calls) == expected
        assert bool(text.strip()) is not bool(expected)
        assert (sample.kind == "tool_bare") is (bool(calls) and calls[0][1] == {})
        assert all(used in sample.answer for used in sample.talk.used)
        results = "\n".join(message["content"] for message in sample.talk.messages if message["role"] == "tool")
        assert all(used in results for used in sample.talk.used)


def test_a_chain_calls_with_what_the_first_call_brought():
    for sample in held_out_cases("tool_chain", 100):
        (result,) = [message["content"] for message in sample.talk.messages if message["role"] == "tool"]
        ask = next(m["content"] for m in reversed(sample.talk.messages) if m["role"] == "user")
        _, arguments = calls_in(sample.talk.tools, sample.answer)[1][0]
        found = [value for value in arguments.values() if isinstance(value, str) and value not in ask]
        assert found and all(value in result for value in found)


def test_no_held_out_prompt_occurs_in_training():
    training = {json.dumps(sample.prompt) for sample in samples(3000)}
    for kind in CALLING:
        assert not training & {json.dumps(case.prompt) for case in held_out_cases(kind, 50)}


def test_the_chat_template_writes_a_request_as_the_corpus_does(tokenizer):
    for sample in samples(400):
        text = tokenizer.apply_chat_template(list(sample.talk.messages), tools=list(sample.talk.tools), tokenize=False)
        assert text == render(sample)
        prompt = tokenizer.apply_chat_template(
            list(sample.talk.messages[:-1]), tools=list(sample.talk.tools), tokenize=False, add_generation_prompt=True
        )
        assert prompt == text.removesuffix(sample.answer + "<|end|>")


def test_a_prompt_of_turns_is_the_prompt_of_the_request(tokenizer):
    for sample in samples(50):
        turns = tokenizer.apply_chat_template(sample.prompt, tokenize=False, add_generation_prompt=True)
        assert turns + sample.answer + "<|end|>" == render(sample)


def test_conversations_without_tools_render_as_before(tokenizer):
    for sample in itertools.islice(stream(5), 300):
        if not sample.messages:
            continue
        for prompt in (False, True):
            new, old = (
                tokenizer.apply_chat_template(
                    list(sample.messages), tokenize=False, add_generation_prompt=prompt, chat_template=template
                )
                for template in (TOOL_CHAT_TEMPLATE, CHAT_TEMPLATE)
            )
            assert new == old


@pytest.mark.parametrize("role", ["developer", "ipython"])
def test_an_unknown_role_is_refused(tokenizer, role):
    with pytest.raises(Exception, match=f"role {role} is unknown, allowed are system, user, assistant, tool"):
        tokenizer.apply_chat_template([{"role": role, "content": "x"}], tokenize=False)


def test_the_embedded_models_own_template_is_the_one_without_tools_until_it_is_trained():
    template = load_tokenizer(embedded_checkpoint()).chat_template
    assert template == (TOOL_CHAT_TEMPLATE if knows_tools(template) else CHAT_TEMPLATE)


def test_calls_are_found_in_the_template_in_the_format_of_hermes():
    assert format_of(TOOL_CHAT_TEMPLATE) is HERMES
    assert knows_tools(TOOL_CHAT_TEMPLATE) and not knows_tools(CHAT_TEMPLATE) and not knows_tools(None)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "the city"},
        "days": {"type": "array", "items": {"enum": ["Monday", "Sunday"]}},
        "most": {"type": ["integer", "null"]},
        "of": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "where": {"type": "object", "properties": {"items": {"type": "string"}, "n": {"type": "integer"}},
                  "required": ["items"]},
        "level": {"enum": [1, None]},
        "free": {},
        "all": True,
    },
    "required": ["city", "where"],
}  # fmt: skip
LISTED = """Tools:
f(city,days?:(Monday|Sunday)[],most?:integer|null,of?:number|string,where:{items,n?:integer},level?:1|null,free?:any,\
all?:any) Do it.
- city: the city
now()"""


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be short."}]])
def test_any_schema_has_a_line(tokenizer, system):
    tools = [
        {"type": "function", "function": {"name": "f", "description": "Do it.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now"}},
    ]
    user = {"role": "user", "content": "U"}
    text = tokenizer.apply_chat_template([*system, user], tools=tools, tokenize=False)
    before = "Be short.\n" if system else ""
    assert text == f"<|system|>{before}{LISTED}<|end|><|user|>U<|end|>"


def test_text_before_a_call_and_arguments_that_are_text_are_written_as_they_are(tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "assistant", "content": "Let me see.", "tool_calls": [call]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == ('<|assistant|>Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call><|end|>')


def test_results_that_follow_each_other_share_a_turn():
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    (turn,) = turns_of([], results)
    assert turn == {
        "role": "user",
        "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
    }


def test_conversations_fit_the_context_and_four_small_tools_take_little_of_it(tokenizer):
    lengths, of_tools = [], []
    for sample in samples(800):
        lengths.append(len(encode_document(tokenizer, sample)[0]))
        of_tools += [len(tokenizer.encode(turns_of([tool], [])[0]["content"])) for tool in sample.talk.tools]
    assert max(lengths) < 0.7 * CONTEXT
    assert 4 * sum(of_tools) / len(of_tools) < CONTEXT / 6


def test_only_calls_and_answers_are_marked_as_written(tokenizer):
    for sample in samples(60):
        ids, is_written = encode_document(tokenizer, sample)
        marked = tokenizer.decode([token for token, wanted in zip(ids, is_written, strict=True) if wanted])
        turns = [turn["content"] for turn in sample.messages if turn["role"] == "assistant"]
        assert marked == "".join(f"{turn}<|end|>" for turn in turns)
        assert tokenizer.convert_tokens_to_ids(ROLES["system"]) == ids[0]


def test_the_mixture_of_the_training_from_nothing_has_no_tools():
    assert not set(MIXTURE) & set(TOOLS)
    assert all(sample.talk is None for sample in itertools.islice(stream(0), 300))


def test_held_out_conversations_begin_alike_with_and_without_tools():
    without, with_tools = (held_out_conversations(5, 40, knows) for knows in (False, True))
    assert with_tools[:40] == without and len(without) == 40
    assert len(with_tools) == 50 and all(sample.talk is not None for sample in with_tools[40:])
