"""The model that a soak serves."""

import pytest

from jaxinfer.server.parse.formats import format_of
from soaking.model import EMBEDDED, TEMPLATE, model_with_tools

TOOLS_TEMPLATE = EMBEDDED.parents[1] / "scripts" / "training" / "data" / "tool_chat_template.jinja"


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint without weights, whose template has no tools."""
    found = tmp_path / "own" / "small"
    found.mkdir(parents=True)
    (found / "config.json").write_text("{}")
    (found / "chat_template.jinja").write_text("{{- messages[0].content -}}")
    return found


def test_a_checkpoint_without_tools_is_served_as_a_copy_with_them(checkpoint, tmp_path):
    found = model_with_tools(tmp_path, checkpoint)
    assert found == tmp_path / "small"
    assert (found / "config.json").read_text() == "{}"
    assert (found / "chat_template.jinja").read_text() == TEMPLATE
    assert (checkpoint / "chat_template.jinja").read_text() == "{{- messages[0].content -}}"


def test_a_checkpoint_that_has_learnt_tools_is_served_as_it_is(checkpoint, tmp_path):
    (checkpoint / "chat_template.jinja").write_text(TOOLS_TEMPLATE.read_text())
    assert model_with_tools(tmp_path, checkpoint) == checkpoint


def test_the_server_knows_the_calls_of_both_templates():
    for template in (TEMPLATE, TOOLS_TEMPLATE.read_text()):
        found = format_of(template)
        assert found is not None and found.name == "hermes"
