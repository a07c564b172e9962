"""How diffusion models generate, validated where it is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import check_positive_integer, fields_of

UNMASK_RULES = ("threshold", "hierarchy", "factor")
CACHES = ("auto", "prefix")


@dataclass(frozen=True)
class DiffusionConfig:
    """How blocks of masks become tokens. Probabilities are those of the tokens that a round draws.

    Attributes:
        block_size: tokens that are denoised together; None: the model's.
        unmask: what a round commits: "threshold" (whatever is at least `threshold` sure, or else the surest),
            "hierarchy" (whatever is more than `threshold` sure, and the surest of each run of masks if it is more than
            `low_threshold` sure) or "factor" (the surest, while the nth is at least 1 - `factor` / (n + 1) sure).
        threshold, low_threshold, factor: see `unmask`.
        cache: "auto" or "prefix": keys and values of whole blocks are computed once.
        edit_threshold: committed tokens are replaced by others that are drawn in their places with more than this
            probability (LLaDA2.1's token editing); None: never.
        max_post_edit_steps: rounds of a block that do so where no mask is left, at most.
        maximum_unroll: most rounds in one launch, where no request needs the host in between.
        expected_tpf: tokens that a round commits, as far as one can tell: launches run no more rounds than what is left
            to generate takes with so many.
        early_stop: nothing is computed behind a block with an end-of-sequence token.

    Raises:
        ValueError: a field is out of range, named with its value and what is allowed.
    """

    block_size: int | None = None
    threshold: float = 0.9
    unmask: str = "threshold"
    low_threshold: float = 0.4
    factor: float = 1.0
    cache: str = "auto"
    edit_threshold: float | None = None
    max_post_edit_steps: int = 16
    maximum_unroll: int = 4
    expected_tpf: int = 8
    early_stop: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_post_edit_steps", "maximum_unroll", "expected_tpf"):
            if name != "block_size" or self.block_size is not None:
                check_positive_integer(name, getattr(self, name))
        for name in ("threshold", "low_threshold", "edit_threshold"):
            value = getattr(self, name)
            if (name, value) == ("edit_threshold", None):
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
                raise ValueError(f"{name} must be a probability, from 0 to 1, got {value!r}")
        if not isinstance(self.factor, (int, float)) or isinstance(self.factor, bool) or not self.factor >= 0:
            raise ValueError(f"factor must be 0 or more, got {self.factor!r}")
        if self.low_threshold > self.threshold and self.unmask == "hierarchy":
            raise ValueError(f"low_threshold ({self.low_threshold}) must be at most threshold ({self.threshold})")
        for name, allowed in (("unmask", UNMASK_RULES), ("cache", CACHES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.early_stop, bool):
            raise ValueError(f"early_stop must be True or False, got {self.early_stop!r}")

    @classmethod
    def of(cls, value: DiffusionConfig | Mapping[str, Any]) -> DiffusionConfig:
        """The configuration itself, or the one that a dict of its fields says.

        Raises:
            ValueError: as for the class, or a key is no field of it.
        """
        return value if isinstance(value, cls) else cls(**fields_of(cls, "diffusion_config", value))
