"""A new drafter is its own module and a row in `METHODS`; nothing else of the engine knows its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.programs.program import Device
from jaxinfer.speculative.proposer import Drafts, Proposer, RoundsShape, Seated, integers
from jaxinfer.speculative.tails import TailPages
from jaxinfer.strategies.draft_methods import METHODS, Beliefs, DraftMethod, StatePlace
from jaxinfer.strategies.draft_options import SpeculativeConfig
from jaxinfer.strategies.ngram import Ngrams
from tests.builders import make_request, model_config, random_model, run_requests
from tests.speculative.builders import speculating_engine

ECHO = "echo"


class EchoProposer:
    """Proposer that drafts the latest token again, and keeps nothing of a sequence."""

    reads = ()
    writes = (ECHO,)
    may_find_nothing = knows_pages = False
    capture = ()
    models: Mapping[str, Any] = {}

    def follow(
        self, device: Device, batch: StepBatch, features: jax.Array | None, *, again: bool = False
    ) -> dict[str, Any]:
        return {ECHO: device.state[ECHO]}

    def propose(self, device: Device, seated: Seated, shape: RoundsShape) -> tuple[dict[str, Any], Drafts]:
        drafts = jnp.repeat(seated.token[:, None], shape.width - 1, axis=1)
        return {ECHO: device.state[ECHO]}, Drafts(drafts, seated.num_drafts, jnp.zeros(len(drafts), jnp.float32))

    def settle(self, device: Device, seated: Seated, landed: jax.Array, features: jax.Array | None) -> dict[str, Any]:
        return {ECHO: device.state[ECHO]}


class Echo(Ngrams):
    """`DraftModule` of the toy, which like n-grams has no model."""

    window: int | None = 1
    state = ECHO

    def proposer(self, config: SpeculativeConfig, drafter: Any, tails: TailPages | None) -> Proposer:
        return EchoProposer()

    def make_state(self, engine: EngineConfig, drafter: Any, num_pages: int, place: StatePlace) -> Any:
        return integers((1,), place.seats, abstract=place.is_abstract)


METHOD = Echo()
ROW = DraftMethod(
    ECHO, "the latest token again", __name__, Beliefs(drafts=1.0, accepted=0.1), {"num_speculative_tokens": 3},
    has_distributions=False,
)  # fmt: skip


def test_a_row_and_a_module_are_all_that_a_drafter_needs(monkeypatch, idle_engine):
    monkeypatch.setitem(METHODS, ECHO, ROW)
    model = random_model(model_config())
    core = speculating_engine(model, method=ECHO, max_num_seqs=2, max_num_batched_tokens=20)

    def requests():
        return [make_request(str(i), [7, 7 + i, 9], max_tokens=30, logit_bias={5: 4.0 * i}) for i in range(2)]

    assert run_requests(core, requests()) == run_requests(idle_engine(), requests())
    metrics = core.get_metrics()
    assert metrics.spec_decode_num_draft_tokens > metrics.spec_decode_num_accepted_tokens > 0


def test_without_its_row_the_method_is_refused():
    with pytest.raises(ValueError, match="method must be one of draft_model, ngram, eagle3, got 'echo'"):
        SpeculativeConfig(ECHO)
