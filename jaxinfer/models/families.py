"""Supported families of Hugging Face architectures: which one a configuration belongs to, and what it may not ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config_fields import UnsupportedConfigError, is_active
from jaxinfer.models.dense_families import DENSE_FAMILIES
from jaxinfer.models.diffusion_families import DIFFUSION_FAMILIES
from jaxinfer.models.family import Family
from jaxinfer.models.sparse_families import SPARSE_FAMILIES

FAMILIES = {family.architecture: family for family in (*DENSE_FAMILIES, *SPARSE_FAMILIES, *DIFFUSION_FAMILIES)}


def family_of(hf: Mapping[str, Any]) -> Family:
    names = hf.get("architectures") or []
    for family in FAMILIES.values():
        if not {family.architecture, *family.other_architectures}.isdisjoint(names):
            # Hugging Face chooses the class by model_type, so another family's model_type means another computation.
            if hf.get("model_type", family.model_type) not in {family.model_type, *family.other_model_types}:
                raise UnsupportedConfigError(
                    f"model_type={hf['model_type']!r} does not belong to {family.architecture}, whose model_type is "
                    f"{family.model_type!r}"
                )
            return family
    if not names:
        kind = hf.get("model_type")
        alike = [family for family in FAMILIES.values() if kind in {family.model_type, *family.other_model_types}]
        if len(alike) == 1:
            return alike[0]
        if alike:
            raise UnsupportedConfigError(
                f"model_type={hf['model_type']!r} may be {' or '.join(family.architecture for family in alike)}; "
                "config.json must say which, as architectures"
            )
    found = ", ".join(names) or f"model_type={hf.get('model_type')!r}"
    raise UnsupportedConfigError(f"unknown architecture {found}; supported: {', '.join(FAMILIES)}")


def refuse_active(values: Mapping[str, Any], family: Family) -> None:
    quantization = values.get("quantization_config")
    quant_method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if is_active(quantization) and (quant_method is None or quant_method != family.quantization):
        raise UnsupportedConfigError("quantization_config is set: quantized checkpoints are not supported")
    if values.get("use_rmsnorm") is False:
        raise UnsupportedConfigError("use_rmsnorm=False is not supported")
    for name, only in family.fixed.items():
        value = values.get(name, only)
        if value != only and (is_active(value) or is_active(only)):
            raise UnsupportedConfigError(f"{name}={value!r} is not supported; {only!r} is")
    types = values.get("layer_types") or []
    other = sorted({str(name) for name in (types if isinstance(types, list) else [types])} - {"full_attention"})
    if family.layer_fields is None and other:
        raise UnsupportedConfigError(f"layer_types contains {', '.join(other)}; only full_attention is supported")
