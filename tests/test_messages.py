"""Contents of messages as strings and as lists of parts, for templates that read either or both."""

from __future__ import annotations

import copy
import json

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.tokenizer import Tokenizer
from tests.builders import model_config
from tests.tiny_checkpoints import ASSISTANT, USER, write_tokenizer

_START = "{% for message in messages %}<|{{ message['role'] }}|>"
_END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_PARTS = "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
TEMPLATES = {
    "strings": f"{_START}{{{{ message['content'] }}}}{_END}",
    "strings, trimmed": f"{_START}{{{{ message['content'] | trim }}}}{_END}",
    "strings, added": f"{_START}{{{{ 'x' + message['content'] }}}}{_END}".replace("'x' + ", "'' + "),
    "lists": f"{_START}{_PARTS}{_END}",
    "both": _START
    + "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    + _PARTS
    + "{% endif %}"
    + _END,
}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture
def tokenizer(tmp_path):
    def made(template: str) -> Tokenizer:
        write_tokenizer(tmp_path, chat_template=template)
        return Tokenizer(tmp_path)

    return made


def text_of(tokenizer: Tokenizer, messages: list[dict], **arguments) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(messages, **arguments), skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_part_is_rendered_as_the_string_is(tokenizer, name):
    made = tokenizer(TEMPLATES[name])
    expected = f"{USER}one{ASSISTANT}two{USER}three{ASSISTANT}"
    some = [("user", "one"), ("assistant", "two"), ("user", "three")]
    strings = [{"role": role, "content": text} for role, text in some]
    lists = [{"role": role, "content": parts(text)} for role, text in some]
    before = copy.deepcopy(lists)
    assert text_of(made, strings) == text_of(made, lists) == text_of(made, [*strings[:2], lists[2]]) == expected
    assert lists == before


def test_several_parts_are_lines_of_a_string_or_what_the_template_makes_of_them(tokenizer):
    messages = [{"role": "user", "content": parts("one", "two")}]
    assert text_of(tokenizer(TEMPLATES["strings"]), messages) == f"{USER}one\ntwo{ASSISTANT}"
    assert text_of(tokenizer(TEMPLATES["both"]), messages) == f"{USER}onetwo{ASSISTANT}"
    # A template that is given for one call says nothing of the next one's.
    made = tokenizer(TEMPLATES["strings"])
    assert text_of(made, messages, chat_template=TEMPLATES["lists"]) == f"{USER}onetwo{ASSISTANT}"
    assert text_of(made, messages) == f"{USER}one\ntwo{ASSISTANT}"


def test_other_keys_and_contents_that_are_none_reach_the_template(tokenizer):
    made = tokenizer("{% for m in messages %}{{ m['name'] }}:{{ m['content'] }};{% endfor %}")
    assert text_of(made, [{"role": "user", "name": "a", "content": None}]) == "a:;"


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "part 1 of message 0 has the type 'image_url'"),
        ({"text": "x"}, "part 1 of message 0 has the type None"),
        ({"type": "text", "text": 5}, "part 1 of message 0 must have a string as its text, got 5"),
        ("x", r"part 1 of message 0 must be \{'type': 'text', 'text': ...\}, got 'x'"),
    ],
)
@pytest.mark.parametrize("name", ["strings", "lists"])
def test_a_part_that_is_not_text_is_refused_by_name(tokenizer, name, part, error):
    with pytest.raises(ValueError, match=error):
        tokenizer(TEMPLATES[name]).apply_chat_template([{"role": "user", "content": [*parts("a"), part]}])


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return Tokenizer("checkpoints/tiny-diffusion")


TEXTS = ["", "plain", "a [MASK] b", "[MASK][MASK]", "[MASK", "<|end|> [MASK]<|user|>[PLAN]", " [MASK]\n[END] é"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_token_that_is_left_out_is_text(embedded, text):
    mask = embedded.fast.token_to_id("[MASK]")
    without, found = embedded.without(mask), embedded.without(mask).encode(text)
    assert mask not in found
    assert without.decode(found, skip_special_tokens=False) == text
    # Around it everything is as it was: the tokenizer of a vocabulary whose mask is written otherwise.
    described = json.loads(embedded.fast.to_str().replace('"content":"[MASK]"', '"content":"[OTHER]"'))
    assert found == type(embedded.fast).from_str(json.dumps(described)).encode(text).ids
    if "[MASK]" not in text:
        assert found == embedded.encode(text)
    else:
        assert mask in embedded.encode(text)


def test_markers_of_the_template_stay_tokens_where_a_message_has_the_text_of_the_mask(embedded):
    mask, user = (embedded.fast.token_to_id(text) for text in ("[MASK]", "<|user|>"))
    found = embedded.without(mask).apply_chat_template([{"role": "user", "content": "What is [MASK]?"}])
    assert user in found and mask not in found
    assert "What is [MASK]?" in embedded.decode(found)


def test_prompts_of_a_diffusion_model_have_the_mask_as_text_but_not_as_a_token(embedded):
    mask = embedded.fast.token_to_id("[MASK]")
    config = model_config("SDARForCausalLM", vocab_size=2048, block_size=4, mask_token_id=mask)
    processor = InputProcessor(EngineConfig(max_model_len=64), config, {}, embedded)
    params = SamplingParams(max_tokens=4)
    rendered = processor.render([{"role": "user", "content": "[MASK]"}], 0, {})
    for prompt in ("a [MASK] b", {"prompt": "[MASK]"}, rendered):
        (request,) = processor.requests([prompt], params, stream=False)
        assert isinstance(request, Request) and mask not in request.prompt_token_ids
    with pytest.raises(ValueError, match=rf"prompt 0 has the mask token \({mask}\)"):
        processor.requests([[1, mask, 2]], params, stream=False)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_encoded_as_by_the_tokenizer_of_hugging_face(embedded, text):
    assert embedded.encode(text) == embedded.hf.encode(text)
