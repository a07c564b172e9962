"""Finding checkpoints: a directory first, then an embedded one of that name; the draft model fits its target."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.checkpoint import load_checkpoint, load_head, read_config
from jaxinfer.checkpoint.directory import (
    EMBEDDED_CHECKPOINT,
    EMBEDDED_DIFFUSION,
    EMBEDDED_DRAFT,
    EMBEDDED_EAGLE3,
    embedded_checkpoint,
    find_checkpoint,
    find_config,
)


@pytest.mark.parametrize("name", [EMBEDDED_CHECKPOINT, EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_DIFFUSION])
def test_an_embedded_checkpoint_is_found_by_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(name) == find_checkpoint(Path(name)) == embedded_checkpoint(name)
    assert find_config(name) == embedded_checkpoint(name) / "config.json"


def test_a_directory_goes_before_an_embedded_checkpoint_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir(EMBEDDED_DRAFT)
    assert find_checkpoint(EMBEDDED_DRAFT) == Path(EMBEDDED_DRAFT)


def test_the_embedded_draft_model_speaks_the_language_of_its_target():
    target, draft = embedded_checkpoint(), embedded_checkpoint(EMBEDDED_DRAFT)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (draft / name).read_text() == (target / name).read_text()
    (_, of_target), (_, of_draft) = read_config(target), read_config(draft)
    for name in ("vocab_size", "max_position_embeddings", "eos_token_ids"):
        assert getattr(of_draft, name) == getattr(of_target, name)
    assert of_draft.num_layers < of_target.num_layers


def test_the_embedded_diffusion_model_speaks_the_language_of_the_one_it_is_made_from():
    base, diffusion = embedded_checkpoint(), embedded_checkpoint(EMBEDDED_DIFFUSION)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (diffusion / name).read_text() == (base / name).read_text()
    (_, of_base), (_, config) = read_config(base), read_config(diffusion)
    assert config.vocab_size == of_base.vocab_size and config.eos_token_ids == of_base.eos_token_ids
    assert config.block_size == 32 and config.mask_token_id not in config.eos_token_ids and config.experts is not None


@pytest.mark.parametrize("name", [EMBEDDED_DRAFT, EMBEDDED_DIFFUSION])
def test_the_other_embedded_models_can_be_loaded(name):
    config, model = load_checkpoint(name, dtype="float32")
    assert model.embed.embedding.shape == (config.vocab_size, config.hidden_size)
    assert np.isfinite(model.embed.embedding[...]).all()


def test_the_embedded_head_fits_the_embedded_target():
    _, target = read_config(embedded_checkpoint())
    head = load_head(EMBEDDED_EAGLE3, target, dtype="float32")
    assert head.config.capture == (2, 4, 5) and not head.config.has_embeddings
    ids = np.asarray(head.target_ids[...])
    assert len(set(ids.tolist())) == head.config.draft_vocab_size and set(target.eos_token_ids) <= set(ids.tolist())
    assert np.isfinite(head.lm_head.kernel[...]).all()
