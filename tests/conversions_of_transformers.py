"""Makes `covmerge/files/checkpoints/conversions.json` of the registry of the installed transformers.

Run `python -m tests.conversions_of_transformers` after an upgrade of transformers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, conversion_mapping
from transformers.models.auto import modeling_auto

import covmerge

TABLE = Path(covmerge.__file__).parent / "files/checkpoints/conversions.json"
_RENAMINGS = ("WeightRenaming", "PrefixChange", "GroupWeightRename")
# What follows from patterns and shapes alone.
_OPERATIONS = ("MergeModulelist", "Concatenate", "Chunk", "Split", "Interleave", "Transpose")


def rules_of(transform: Any) -> dict[str, Any] | None:
    """Return a transform as the table has it; None: it goes by more than patterns and shapes."""
    kind = type(transform).__name__
    rule = {"from": transform.source_patterns, "to": transform.target_patterns}
    if kind in _RENAMINGS:
        return rule
    operations = [] if kind != "WeightConverter" else transform.operations
    simple = operations and all(
        type(o).__name__ in _OPERATIONS
        and not getattr(o, "check_dims", False)
        and getattr(o, "num_shards_attribute", None) is None
        for o in operations
    )
    if not simple:
        return {**rule, "by": []}
    return {**rule, "by": [_operation(o) for o in operations]}


def _operation(operation: Any) -> list[Any]:
    kind = type(operation).__name__
    if kind == "Transpose":
        return [kind, operation.dim0, operation.dim1]
    return [kind, operation.dim]


def architectures() -> Iterator[tuple[str, Any]]:
    """Every kind and class of model that an Auto class makes, with a model of its default config."""
    pairs = {
        (kind, name)
        for mapping, value in vars(modeling_auto).items()
        if re.fullmatch(r"MODEL_.*MAPPING_NAMES", mapping)
        for kind, names in value.items()
        for name in ([names] if isinstance(names, str) else names)
    }
    for kind, name in sorted(pairs):
        made = _made(kind, name)
        if made is not None:
            yield f"{kind}/{name}", made


def _made(kind: str, name: str) -> Any:
    """Return a small model of a class, or one of its default size; None: its config has no default."""
    for small in (True, False):
        try:
            config = AutoConfig.for_model(kind)
            if small:
                _make_small(config)
            with torch.device("meta"):
                return getattr(transformers, name)(config)
        except Exception as error:  # whatever a config that nobody wrote makes a model raise
            said = f"{name}: {type(error).__name__}: {str(error).strip()[:80]}"
    print(said, file=sys.stderr)
    return None


def _make_small(config: Any) -> None:
    for key in ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"):
        for part in (config, *(getattr(config, k, None) for k in config.sub_configs)):
            value = getattr(part, key, None)
            if isinstance(value, int) and value > 2 and not getattr(part, "layer_types", None):
                setattr(part, key, 2)


def scopes_of(model: Any) -> list[list[str]]:
    """Return what of the registry a model uses: the prefix of a part, the base model's, and the key."""
    found: list[tuple[str, Any]] = []
    own = conversion_mapping.get_checkpoint_conversion_mapping

    def recording(key: str) -> Any:
        given = own(key)
        if given:
            found.append((key, given[0]))
        return given

    conversion_mapping.get_checkpoint_conversion_mapping = recording
    try:
        conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    finally:
        conversion_mapping.get_checkpoint_conversion_mapping = own
    return [
        [key] if first.scope_prefix is None else [key, first.scope_prefix, first.base_model_prefix]
        for key, first in found
    ]


def table() -> dict[str, Any]:
    """Return the whole table."""
    registry = {
        key: [rules_of(t) for t in transforms]
        for key, transforms in conversion_mapping._build_checkpoint_conversion_mapping().items()
        if key != "legacy"
    }
    models = {name: found for name, model in architectures() if (found := scopes_of(model))}
    return {"transformers": transformers.__version__, "rules": registry, "architectures": models}


def written(table: dict[str, Any]) -> str:
    """Return a table as JSON, an entry a line."""
    parts = [f'"transformers": {json.dumps(table["transformers"])}']
    for key in ("rules", "architectures"):
        lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table[key].items()))
        parts.append(f'"{key}": {{\n' + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    TABLE.write_text(written(table()))
