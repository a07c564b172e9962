"""The rule that decides from transformers' source text whether an unknown `config.json` field can change the output.

transformers is the reference for its own model types: a field that its source does not read changes nothing there. The
configuration class alone does not tell, because it does not declare every field that its model reads. The text is
searched, never imported, so that neither torch nor a model module is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

# Code that runs for every model type and reads fields of its configuration.
_SHARED_CODE = ("configuration_utils.py", "modeling_rope_utils.py", "masking_utils.py", "cache_utils.py")
# Parts of field names that usually mean a computation, even if only code that comes with a checkpoint does it.
_TELLING = (
    "softcap", "logit", "rope", "rotary", "window", "sink", "norm", "scal", "multipl", "bias", "router", "expert",
    "gate", "alibi", "clip", "residual", "quant", "head", "attn_", "attention_",
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z_]\w*")
_MODEL_TYPE = re.compile(r"^    model_type\s*(?::[^=\n]*)?=\s*[\"']([^\"']+)[\"']", re.MULTILINE)
# A field is an annotation of the class, or an attribute that its initialiser sets.
_DECLARED = re.compile(r"^    ([a-z]\w*)\s*:|^\s+self\.([a-z]\w*)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """The decision about one field: the step of the rule that made it, and the reason in words."""

    step: int
    refuses: bool
    reason: str


def verdict(model_type: str, name: str) -> Verdict:
    """Judge an active field that a family neither reads nor lists.

    Args:
        model_type: model type of the reference. If transformers does not know it, the field is refused, because there
            is no code to search.
    """
    if not name.isidentifier():
        return Verdict(1, False, "no Python code reads a field by such a name")
    folder = _folders().get(model_type)
    if folder is None:
        return Verdict(2, True, f"transformers has no model type {model_type!r} whose source could be searched")
    is_named = name in _words(f"models/{folder}/configuration_*.py") | _words(f"models/{folder}/modeling_*.py")
    if name.startswith("_") and not is_named:
        return Verdict(1, False, f"it is private, and {model_type} in transformers does not name it")
    if is_named:
        return Verdict(3, True, f"{model_type} in transformers computes with it")
    if any(name in _words(path) for path in _SHARED_CODE):
        return Verdict(4, True, "transformers' shared code reads it")
    if name in _declared():
        return Verdict(5, True, "other models of transformers compute something by that name")
    telling = next((part for part in _TELLING if part in name.lower()), None)
    if telling is not None:
        return Verdict(6, True, f"its name contains {telling!r}, which usually means a computation")
    return Verdict(7, False, "nothing in transformers can read it")


def is_known_type(model_type: str) -> bool:
    """Whether transformers implements the model type itself, without code from a checkpoint."""
    return model_type in _folders()


def _root() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@functools.cache
def _words(pattern: str) -> frozenset[str]:
    """Every identifier in the files that match a pattern."""
    root = _root()
    paths = () if root is None else root.glob(pattern)
    return frozenset(word for path in paths for word in _WORD.findall(path.read_text(encoding="utf-8")))


@functools.cache
def _configurations() -> dict[str, str]:
    """Folder -> text of its configuration files, for every model of transformers."""
    root, texts = _root(), {}
    for path in () if root is None else sorted(root.glob("models/*/configuration_*.py")):
        texts[path.parent.name] = texts.get(path.parent.name, "") + path.read_text(encoding="utf-8")
    return texts


@functools.cache
def _folders() -> dict[str, str]:
    """Model type -> the folder of its code."""
    found: dict[str, str] = {}
    for folder, text in _configurations().items():
        for model_type in _MODEL_TYPE.findall(text):
            if model_type == folder or model_type not in found:
                found[model_type] = folder
    return found


@functools.cache
def _declared() -> frozenset[str]:
    """Fields that the configuration of any model type declares."""
    pairs = (pair for text in _configurations().values() for pair in _DECLARED.findall(text))
    return frozenset(annotated or assigned for annotated, assigned in pairs)
