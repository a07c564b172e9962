"""Speculation adds few compiled programs, and has one for every launch that can occur."""

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.programs.buckets import Buckets
from jaxinfer.speculative.shapes import SpeculationShapes
from tests.builders import model_config, random_model
from tests.speculative.builders import random_head, speculating_engine


def shapes_of(max_model_len: int, max_num_seqs: int = 256) -> tuple[Buckets, SpeculationShapes]:
    engine = EngineConfig(max_model_len, max_num_seqs=max_num_seqs, kv_cache_tokens=max_model_len)
    buckets = Buckets.from_config(engine)
    return buckets, SpeculationShapes.of(buckets, widths=(3, 5), max_rounds=8, page_size=16)


@pytest.mark.parametrize(("max_model_len", "most"), [(1024, 17), (8192, 17), (65536, 17), (131072, 24)])
def test_an_engine_has_at_most_so_many_programs_more(max_model_len, most):
    _, shapes = shapes_of(max_model_len)
    assert len(shapes.rounds) + len(shapes.lanes) + len(shapes.catch_up) == most


@pytest.mark.parametrize("num_widths", [1, 2])
def test_many_rows_have_programs_of_fewer_drafts(num_widths):
    buckets = Buckets.from_config(EngineConfig(1024, kv_cache_tokens=1024))
    shapes = SpeculationShapes.of(buckets, widths=(3, 5, 9), num_widths=num_widths, max_rounds=8, page_size=16)
    widths = {rows: {s.width for s in shapes.rounds if s.batch.num_rows == rows} for rows in (1, 4, 32, 128, 256)}
    two = {1: {9}, 4: {5, 9}, 32: {5, 9}, 128: {3, 5}, 256: {3}}
    assert widths == {rows: {max(found)} if num_widths == 1 else found for rows, found in two.items()}


@pytest.mark.parametrize(("max_model_len", "most"), [(1024, 17), (8192, 26), (65536, 26)])
def test_trees_beside_chains_take_the_place_of_short_chains(max_model_len, most):
    engine = EngineConfig(max_model_len, kv_cache_tokens=max_model_len)
    shapes = SpeculationShapes.of(
        Buckets.from_config(engine), widths=(6,), max_rounds=8, page_size=16, num_nodes=59, tree_width=9
    )
    assert len(shapes.rounds) + len(shapes.lanes) + len(shapes.catch_up) <= most
    trees = [shape for shape in (*shapes.rounds, *shapes.lanes) if shape.num_nodes]
    assert {shape.batch.num_rows for shape in trees} == {1, 2, 4, 8, 16} and shapes.most_in_trees == 16
    assert all(shape.verified == 60 and shape.width == 9 for shape in trees)


@pytest.mark.parametrize("max_num_seqs", [1, 4, 40, 256])
def test_sequences_in_lanes_have_a_program_if_any_does(max_num_seqs):
    buckets, shapes = shapes_of(8192, max_num_seqs)
    for sequences in range(1, min(max_num_seqs, 64) + 1):
        found = shapes.rounds_for(rows=sequences, pages_per_row=buckets.pages_per_row[-1], num_drafts=4, lanes=True)
        assert found is not None and found.batch.num_tokens >= sequences and found.width == 5


def test_trees_beyond_the_token_budget_are_said_to_be_chains_once(caplog):
    model = random_model(model_config())
    trees = {"num_speculative_tokens": 12, "tree_depth": 3, "tree_top_k": 4}
    for tokens, most in ((13, 0), (12, 1)):
        caplog.clear()
        speculating_engine(
            model, random_head(model.config), speculative=trees, max_num_seqs=1, max_num_batched_tokens=tokens
        )
        said = [message for message in caplog.messages if "do not fit into max_num_batched_tokens" in message]
        assert said == ["trees of 12 drafts do not fit into max_num_batched_tokens=12: chains are drafted"] * most
