"""Settings of generation with diffusion models, validated on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.field_checks import check_positive_integer, fields_of

UNMASK_RULES = ("threshold", "hierarchy", "factor", "credit")
CACHES = ("auto", "none", "prefix", "dual")


@dataclass(frozen=True)
class DiffusionConfig:
    """Settings of denoising. Confidence is the probability of the token that a round draws at a place.

    Attributes:
        block_size: tokens that are denoised together; None: the model's, 32 for a bidirectional one.
        unmask: rule that chooses what a round commits. "threshold": tokens with a confidence of at least `threshold`,
            or else the most confident one. "hierarchy": tokens above `threshold`, the most confident one, and that of
            each run of masks if it is above `low_threshold`. "factor": the most confident ones, while the nth is at
            least 1 - `factor` / (n + 1). "credit": as "threshold", but top tokens of earlier rounds become likelier.
        threshold, low_threshold, factor: see `unmask`.
        credit_alpha, boost_gamma, decay_beta: parameters of "credit". A round multiplies credits by `decay_beta`, adds
            the probability of each place's top token, to the power of `boost_gamma`, to that token's credit, and draws
            from logits + `credit_alpha` * log(1 + credit).
        cache: which keys and values are reused. "auto": "prefix" for block-causal models, "dual" for bidirectional
            ones. In a block-causal model, "prefix" computes those of whole blocks once, exactly. In a bidirectional
            one, reused ones are from the time when the block began; every round recomputes everything from the block on
            ("prefix"), the block alone ("dual"), or everything ("none").
        prefix_look, after_look: tokens before and after the block that every round computes with it (vicinity).
        cont_weight: in bidirectional models, the mean embedding of the tokens that the previous round expected is added
            to a mask's own, with a weight that grows up to this one (IterSmooth); 0: no addition, and the next four
            fields have no effect.
        cont_weight_init, cont_weight_growth: the weight in the first round of a sequence, and its increase per round.
        threshold_decay: round i requires a probability of 1 - i * this, until that is `threshold`.
        warmup_steps: number of first rounds of a sequence that compute everything.
        edit_threshold: a committed token is replaced if another one is drawn in its place with more than this
            probability (LLaDA2.1's token editing); None: never.
        max_post_edit_steps: most rounds of a block that edit tokens after its last mask is gone.
        maximum_unroll: most rounds in one launch, where no request needs the host in between.
        expected_tpf: estimated tokens committed per round (forward pass): a launch runs no more rounds than the rest of
            the generation takes at this rate.
        early_stop: nothing is computed after a block with an end-of-sequence token.

    Raises:
        ValueError: a field is out of range; the message names it, its value and what is allowed.
    """

    block_size: int | None = None
    threshold: float = 0.9
    unmask: str = "threshold"
    low_threshold: float = 0.4
    factor: float = 1.0
    credit_alpha: float = 0.7
    boost_gamma: float = 0.2
    decay_beta: float = 0.8
    cache: str = "auto"
    prefix_look: int = 0
    after_look: int = 0
    cont_weight: float = 0.0
    cont_weight_init: float = 0.15
    cont_weight_growth: float = 0.02
    threshold_decay: float = 0.02
    warmup_steps: int = 0
    edit_threshold: float | None = None
    max_post_edit_steps: int = 16
    maximum_unroll: int = 4
    expected_tpf: int = 8
    early_stop: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_post_edit_steps", "maximum_unroll", "expected_tpf"):
            if name != "block_size" or self.block_size is not None:
                check_positive_integer(name, getattr(self, name))
        for name in ("prefix_look", "after_look", "warmup_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an integer of 0 or more, got {value!r}")
        for name in ("threshold", "low_threshold", "edit_threshold", "decay_beta"):
            value = getattr(self, name)
            if (name, value) == ("edit_threshold", None):
                continue
            if not _is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name} must be a probability, from 0 to 1, got {value!r}")
        for name in (
            "factor", "credit_alpha", "boost_gamma", "cont_weight", "cont_weight_init", "cont_weight_growth",
            "threshold_decay",
        ):  # fmt: skip
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value!r}")
        if self.low_threshold > self.threshold and self.unmask == "hierarchy":
            raise ValueError(f"low_threshold ({self.low_threshold}) must be at most threshold ({self.threshold})")
        for name, allowed in (("unmask", UNMASK_RULES), ("cache", CACHES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.early_stop, bool):
            raise ValueError(f"early_stop must be True or False, got {self.early_stop!r}")

    @property
    def smooths(self) -> bool:
        """Whether expected embeddings are added to masks."""
        return self.cont_weight > 0

    @classmethod
    def of(cls, value: DiffusionConfig | Mapping[str, Any]) -> DiffusionConfig:
        """Return the configuration itself, or build it from a dict of its fields.

        Raises:
            ValueError: as for the class, or a key is not a field of it.
        """
        return value if isinstance(value, cls) else cls(**fields_of(cls, "diffusion_config", value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
