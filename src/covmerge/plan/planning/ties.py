"""Decisions on tied tensors, made before anything is planned.

If every expert changes tied tensors alike, they stay one tensor. If some expert does not, the base
is viewed untied (`Untied`): each of them is a separate tensor in the plan and in the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.base.types import Role, TensorHeader
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.config_counts import TIED, language_parts
from covmerge.files.tensors.names import find_name, kind_by_name, layer_name
from covmerge.files.tensors.shown import Untied, same_values
from covmerge.plan.planning.models import Model, over_base
from covmerge.plan.vocabulary.rows import rows_of

# Where `tie_word_embeddings` is true, these models also scale the head's inputs by d_model ** -0.5.
# So the key means more than that two tensors are one.
_SCALED_WHERE_TIED = ("t5", "longt5", "pop2piano", "switch_transformers", "udop", "umt5")


def with_ties_undone(
    sources: Mapping[str | None, Checkpoint], form: Literal["model", "adapter"]
) -> dict[str | None, Checkpoint]:
    """Return the sources, with the base (None), or the first without one, untied if some expert needs that.

    Not all releases of PEFT load tied factors, so in an adapter each tensor has its own factors.

    Raises:
        InputError: a model's config says that its head is untied, and no head is stored; or a model
            cannot be stored untied.
    """
    first = next(iter(sources))
    models = {
        key: Model.of(source, key)
        for key, source in sources.items()
        if not isinstance(source, AdapterCheckpoint)
    }
    start = models[first]
    for model in models.values():
        if start.model_type in (None, model.model_type):  # else it is refused later, by its type
            _check_head(model)
    experts = {key: source for key, source in sources.items() if key != first}
    if start.description.source == "names":
        _check_unknown_ties(start, experts)
    if not start.description.tied:
        return dict(sources)
    found = _changed_apart(start, experts, models, form)
    if found is None:
        return dict(sources)
    changes, names = found
    headers = start.checkpoint.headers
    if any(name in headers and headers[name].module is not None for name in names):
        raise InputError(
            f"{changes}, and they are tied in a module of {start.checkpoint.source}: merge that module by "
            "itself (pass its folder of each source), copy the result over the module's folder in copies "
            "of the base and of every expert, and merge these"
        )
    said = f"{changes}, and {start.checkpoint.source} ties them"
    note = (
        f"{said}: each is merged by itself, and the output does not tie them"
        if form == "model"
        else f"{start.checkpoint.source} ties {_both(names)}: in the adapter each has its own update"
    )
    view = _view(start, note)
    found = _changed_apart(Model.of(view), experts, models, form)
    if found is not None:
        raise InputError(
            f"{found[0]}, and transformers ties these in this model whatever its config says: merge "
            "experts that were trained without the one or with both as one tensor"
        )
    if start.model_type in _SCALED_WHERE_TIED and form == "model":
        apart = some([n for group in _groups(start).values() for n in group], 5, quoted=True)
        raise InputError(
            f"{said}. Untied it would be another model: in a '{start.model_type}' `{TIED}` also decides "
            f'that its output is scaled. Store all of {apart} in the base, set "{TIED}" and, if it is '
            'there, "scale_decoder_outputs" to false in its config.json, and multiply its '
            "'decoder.final_layer_norm.weight' by d_model ** -0.5, which is the same model, untied; or "
            f"merge to an adapter ({Hint('form', 'adapter')})"
        )
    return {
        **sources,
        **{k: _as_untied(start, model) for k, model in models.items() if k != first},
        first: view,
    }


def _view(base: Model, *notes: str) -> Untied:
    ties = {n: target for n, target in base.description.tied.items() if target in base.headers}
    return Untied(base.checkpoint, ties, *notes)


def _as_untied(base: Model, expert: Model) -> Checkpoint:
    """Return a full expert with the tensors that the base ties stored separately; often it is unchanged.

    This also holds for an expert that ties them: slices may take only one of the tensors, and
    tokens that it lacks have different rows in each.
    """
    prefixes = [*base.prefixes, *expert.prefixes]
    copies: dict[str, str] = {}
    for name, target in base.description.tied.items():
        stands = find_name(expert.description.tied.get(name, target), prefixes, expert.headers)
        if stands is not None and find_name(name, prefixes, expert.headers) is None:
            copies[name] = stands
    return Untied(expert.checkpoint, copies) if copies else expert.checkpoint


def _changed_apart(
    base: Model,
    experts: Mapping[str | None, Checkpoint],
    models: Mapping[str | None, Model],
    form: Literal["model", "adapter"],
) -> tuple[str, tuple[str, str]] | None:
    """Say of the first expert that it changes two tied tensors differently, and name both, or None."""
    for key, expert in experts.items():
        if isinstance(expert, AdapterCheckpoint):
            apart = _held_apart(base, expert, form)
        else:
            apart = _stored_apart(base, models[key])
        if apart is not None:
            return f"expert '{key}' ({expert.source}) changes {_both(apart)} differently", apart
    return None


def _both(names: tuple[str, str]) -> str:
    return " and ".join(f"'{name}'" for name in names)


def _check_head(model: Model) -> None:
    lacking = model.description.lacks_head
    if lacking is not None and model.checkpoint.gives(lacking):
        raise InputError(
            f"{model} stores no '{lacking}', and its config.json ties it to no other tensor, so that "
            "clients would draw it at random. If it is to be the embedding, set "
            f'"{TIED}": true in its config.json; else save the model again, with its head'
        )


def _check_unknown_ties(base: Model, experts: Mapping[str | None, Checkpoint]) -> None:
    """Raise if an expert may change tied tensors and it is unknown which tensors are tied."""
    config = base.checkpoint.config or {}
    if not any(part.get(TIED) is True for _, part in language_parts(config)):
        return
    for key, expert in experts.items():
        for name, shape in _shapes(expert).items():
            header = TensorHeader(name, shape, torch.float32)
            role = kind_by_name(header, {name: header}).role
            table = role is Role.EMBEDDING and rows_of(name) == "tokens" and not layer_name(name)
            trained = table and isinstance(expert, AdapterCheckpoint)
            if (role is Role.OUTPUT and name not in base.headers) or trained:
                raise InputError(
                    f"config.json of {base.checkpoint.source} ties its output head to an embedding "
                    f"({TIED}), and which tensors that are is not known "
                    f"({some(base.description.notes, 1)}): what becomes of '{name}' of expert '{key}' "
                    "cannot be told. Install transformers (pip install 'covmerge[transformers]'); if it "
                    f'does not know the model, store its head in the base too, with "{TIED}": false in '
                    "config.json"
                )


def _groups(base: Model) -> dict[str, list[str]]:
    """Return the names of each group of tied tensors, by the tensor that the others are tied to."""
    groups: dict[str, list[str]] = {}
    for name, target in base.description.tied.items():
        groups.setdefault(target, [target]).append(name)
    return groups


def _stored_apart(base: Model, expert: Model) -> tuple[str, str] | None:
    """Return two tensors that the base ties and a full model stores with different values, or None."""
    prefixes = [*base.prefixes, *expert.prefixes]
    for name, target in base.description.tied.items():
        one, other = (_stands_for(expert, tied_name, prefixes) for tied_name in (name, target))
        if one is None or other is None or one == other:
            continue
        if expert.description.source == "names":  # without a config, equal copies are tied
            expert.checkpoint.materialize()
            if same_values(expert.checkpoint, one, other):
                continue
        return name, target
    return None


def _stands_for(expert: Model, name: str, prefixes: Sequence[str]) -> str | None:
    """Return the expert's stored tensor for one of the base's, with regard to the expert's own ties."""
    tied = expert.description.tied
    found = find_name(name, prefixes, expert.headers)
    if found is None:
        return find_name(tied[name], prefixes, expert.headers) if name in tied else None
    return tied[found] if tied.get(found) in expert.headers else found


def _held_apart(
    base: Model, adapter: AdapterCheckpoint, form: Literal["model", "adapter"]
) -> tuple[str, str] | None:
    """Return two tensors that the base ties and an adapter changes differently, or None."""
    for target, names in _groups(base).items():
        held = {name: key for name in names if (key := _held_as(base, name, adapter)) is not None}
        # PEFT trains biases in place (`bias`), so tied biases stay one tensor.
        in_place = adapter.adapter_config.get("bias") not in (None, "none")
        if not held or (len(held) == 1 and in_place and next(iter(held)).endswith(".bias")):
            continue
        if target in held and adapter.keeps_ties(held[target]):
            if len(held) == 1:
                continue
            for changed in (name for name, key in held.items() if not adapter.keeps_ties(key)):
                raise InputError(
                    f"{adapter.source} trains rows of '{target}' and all of '{changed}', which "
                    f"{base.checkpoint.source} ties: the rows are those of both, and nobody merges that. "
                    f'Store both in the base, with "{TIED}": false in its config.json, and train over it'
                )
        apart = next((name for name in names if name not in held), None)
        if apart is None and not (
            form == "adapter" and any(o in adapter.low_rank for o in held.values())
        ):
            view = _view(base)
            named = over_base(adapter, Model.of(view))
            first, *others = held
            apart = next((n for n in others if not _alike(named, held[first], held[n])), None)
            if apart is None:
                continue
        other = apart or next(name for name in names if name != target)
        return other, target if other != target else next(iter(held))
    return None


def _held_as(base: Model, name: str, adapter: AdapterCheckpoint) -> str | None:
    """Return the adapter's name for one of the base's tensors; None: the adapter does not change it."""
    info = base.description.tensors.get(name)
    names = [name] if info is None else [name, info.parameter]
    shapes = _shapes(adapter)
    return next(
        (key for n in names if (key := find_name(n, base.prefixes, shapes)) is not None), None
    )


def _shapes(source: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: header.shape for name, header in {**source.headers, **source.low_rank}.items()}


def _alike(adapter: AdapterCheckpoint, one: str, other: str) -> bool:
    adapter.materialize()
    if one in adapter.headers and other in adapter.headers:
        return same_values(adapter, one, other)
    if one not in adapter.low_rank or other not in adapter.low_rank:
        return False
    first, second = adapter.read_factors(one), adapter.read_factors(other)
    return torch.equal(first.left, second.left) and torch.equal(first.right, second.right)
