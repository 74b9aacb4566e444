"""Experts of a mixture that a module holds packed, and its folder one by one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from covmerge.base.findings import Finding, Severity
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.types import Plan

_GATE_AND_UP = re.compile(r"\.experts\.gate_up_proj$")


def packed_in_memory(plan: Plan, base: Checkpoint) -> Iterator[Finding]:
    """Warn where gate and up are merged as one matrix that the model's folder has apart."""
    if not base.is_held or base.config is None or plan.recipe.tensors.fused == "split":
        return
    packed = [
        tensor.name
        for tensor in plan.tensors
        if _GATE_AND_UP.search(tensor.name)
        and isinstance(tensor.operation, Merge)
        and not tensor.operation.procedure.takes_any_shape
    ]
    if packed and _is_apart_in_files(base.config.get("model_type")):
        yield Finding(
            Severity.WARNING,
            f"'{packed[0]}' holds gate and up of all experts, which are merged as one matrix; the folder "
            "of this model has them apart, and its merge is another: to have the same, pass "
            f"{Hint('tensors', {'fused': 'split'})}",
        )


def _is_apart_in_files(model_type: object) -> bool:
    """Whether transformers packs gate and up as it loads such a model."""
    found: list[Any] = []
    with suppress(Exception):  # of a version that has no such table, or knows no such model
        conversion: Any = importlib.import_module("transformers.conversion_mapping")
        found = conversion.get_checkpoint_conversion_mapping(model_type) or []
    return any("gate_up_proj" in name for one in found for name in one.target_patterns)
