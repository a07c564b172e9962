"""What a training begins as: a checkpoint is continued with its own weights, configuration and tokenizer."""

import shutil

import jax.numpy as jnp
import pytest

from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.checkpoint.load import load_checkpoint
from training.beginnings import CONTINUED, from_checkpoint
from training.corpus import FURTHER_MIXTURE, RENAMED_MIXTURE, TOOL_MIXTURE
from training.loop import module_of
from training.model_card import read_stages, write_stages
from training.tokenizer import CHAT_TEMPLATE, load_tokenizer
from training.tool_format import TOOL_CHAT_TEMPLATE, knows_tools
from training.writing import write_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The embedded checkpoint with the chat template of a model that knows no tools."""
    directory = tmp_path_factory.mktemp("base") / "tiny"
    shutil.copytree(embedded_checkpoint(), directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_stages(directory, read_stages(directory)[:1])
    return directory


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """The checkpoint that a training of no steps writes."""
    folder = tmp_path_factory.mktemp("written")
    found = from_checkpoint(base)
    write_checkpoint(
        module_of(found.graph, found.params), found.model, found.tokenizer, folder / "source", folder / "tiny"
    )
    return folder / "tiny"


def test_it_learns_tools_at_lower_rates_than_from_nothing(base):
    found = from_checkpoint(base)
    assert found.mixture is TOOL_MIXTURE and found.schedule is CONTINUED
    assert found.schedule.matrix_rate < 0.02 and found.schedule.warmup > 30


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "jaxinfer.json"]
)
def test_files_stay_as_they_are(base, written, name):
    assert (written / name).read_bytes() == (base / name).read_bytes()


def test_the_chat_template_is_the_one_with_tools(written):
    assert (written / "chat_template.jinja").read_text() == TOOL_CHAT_TEMPLATE
    assert knows_tools(load_tokenizer(written).chat_template)


def test_weights_make_the_round_trip(base, written):
    old, new = (load_checkpoint(folder, dtype="float32")[1] for folder in (base, written))
    assert jnp.array_equal(old.embed.embedding[...], new.embed.embedding[...])


@pytest.mark.parametrize(
    "trainings, mixture", [(1, TOOL_MIXTURE), (2, FURTHER_MIXTURE), (3, RENAMED_MIXTURE), (4, RENAMED_MIXTURE)]
)
def test_what_it_learns_follows_from_what_it_has_learned(base, written, trainings, mixture):
    write_stages(written, read_stages(base)[:1] * trainings)
    found = from_checkpoint(written)
    assert found.tokenizer.chat_template == TOOL_CHAT_TEMPLATE
    assert found.mixture is mixture and found.schedule is CONTINUED
    old = load_checkpoint(written, dtype="float32")[1].embed.embedding[...]
    assert jnp.array_equal(found.params["embed.embedding"], old)
