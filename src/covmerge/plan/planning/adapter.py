"""A plan for an adapter as the output: which tensors it updates, holds whole or leaves out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from typing import Any

import torch

from covmerge.base.errors import InputError, RecipeError, TensorError
from covmerge.base.settings import Hint, rules_for
from covmerge.base.text import counted, of_all_layers, some
from covmerge.base.types import Role
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.adapters.layout import KOHYA_FORM, AdaptedTensor, WholeTensor
from covmerge.files.checkpoints.base import PEFT_FORM, Checkpoint, FactorHeader, LoraForm
from covmerge.maths.methods.mergekit import called
from covmerge.plan.planning.adapter_names import LoraNames, Naming, naming_of
from covmerge.plan.planning.forms import AdapterFactors, AdapterTensor, Form, Unwritten
from covmerge.plan.planning.operations import Copy
from covmerge.plan.planning.types import Formed
from covmerge.plan.planning.work import TensorPlan
from covmerge.plan.recipe import Recipe

# Whether PEFT and vLLM can load an adapter, by what each of them supports (docs/serving.md).

# Values that vLLM accepts for --max-lora-rank; its default is the second.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_DEFAULT = 16


def who_loads_it(
    factors: Collection[AdaptedTensor],
    whole: Collection[WholeTensor],
    vocabulary: Collection[str] = (),
    form: LoraForm = PEFT_FORM,
) -> str:
    """Return a note on the servers that can load an adapter, and the options that they need.

    `vocabulary` are the modules with factors that are token embeddings or output layers.

    Example:
        >>> layer = AdaptedTensor("model.layers.0.self_attn.q_proj.weight", (64, 64), rank=24)
        >>> print(who_loads_it([layer], []))
        PEFT loads the adapter, and vLLM with --enable-lora --max-lora-rank 32
    """
    if form != PEFT_FORM:
        also = ", and so do the tools that read Kohya's files" if form == KOHYA_FORM else ""
        return (
            f"the adapter is a file of {form}'s form: diffusers loads it (load_lora_weights){also}"
        )
    if problems := list(_refused(factors, whole)):
        return f"PEFT loads the adapter, and vLLM does not: {'; '.join(problems)}"
    largest = max(tensor.rank for tensor in factors)
    needed = next(rank for rank in _RANKS if rank >= largest)
    flag = "" if needed <= _DEFAULT else f" --max-lora-rank {needed}"
    only = (
        f", on architectures where it has LoRA of {some(vocabulary, 2)} (Llama and some others)"
        if vocabulary
        else ""
    )
    return f"PEFT loads the adapter, and vLLM with --enable-lora{flag}{only}"


def _refused(factors: Collection[AdaptedTensor], whole: Collection[WholeTensor]) -> Iterator[str]:
    largest = max(factors, key=lambda tensor: tensor.rank)
    if largest.rank > _RANKS[-1]:
        yield (
            f"it takes ranks up to {_RANKS[-1]}, and {largest.module} has {largest.rank} "
            f"({Hint('rank', _RANKS[-1])} truncates it)"
        )
    if windows := [tensor.module for tensor in factors if len(tensor.shape) != 2]:
        yield f"it has no LoRA of convolutions ({some(windows, 2)})"
    if held := [name for tensor in whole for name in tensor.names]:
        yield (
            "it takes nothing but factors, and "
            f"{counted(len(held), 'tensor is', 'tensors are')} held whole ({some(held, 2)}): "
            f"merge to a full model ({Hint('form', 'model')}), or leave them to the base by a rule"
        )


_BIAS = "bias"


def plan_adapter(
    recipe: Recipe,
    tensors: Sequence[TensorPlan],
    experts: Mapping[str, Checkpoint],
    config: Mapping[str, Any] | None,
) -> Formed:
    """Plan every tensor of an output that is an adapter; `config` is the base's."""
    form = recipe.output.names or PEFT_FORM
    _refuse_modules(tensors)
    adapters = {n: e for n, e in experts.items() if isinstance(e, AdapterCheckpoint)}
    naming = naming_of(tensors, adapters) if form == PEFT_FORM else Naming()
    merged = {
        t.name: _Merged(t, experts, naming, form)
        for t in tensors
        if t.merge is not None and t.changed_by_experts
    }
    factors = {
        n: item.as_factors(recipe.output.rank) for n, item in merged.items() if item.has_factors
    }
    if form != PEFT_FORM:
        names = LoraNames(form, adapters, config)
        placed = {n for n in factors if merged[n].factors or names.has_place(merged[n].tensor)}
        # A full model's tensors beside such parts (a VAE) are left out. If no tensor is of such a
        # part, asking for their names raises.
        factors = {n: place for n, place in factors.items() if n in placed or not placed}
        factors = {n: _in_lora_file(place, merged[n].tensor, names) for n, place in factors.items()}
    if not factors:
        raise InputError(
            "none of the tensors that are merged is a layer that an adapter updates: merge to a full "
            f"model ({Hint('form', 'model')})"
        )
    adapted = {item.module for item in merged.values() if item.has_factors}
    whole = _Whole(tensors, naming, adapted)
    for name, item in merged.items():
        if name not in factors and (item.trained_whole or recipe.output.whole):
            whole.add(item.tensor, must=item.trained_whole)
    dtype, held_whole = _dtype(recipe, tensors, experts), whole.places()
    if held_whole and form != PEFT_FORM:
        raise RecipeError(
            f"'{next(iter(held_whole))}' is held whole, which a file of {form}'s form has no place for: "
            f"write PEFT's ({Hint('form', 'peft')}), or leave it to the base by a rule"
        )
    forms: dict[str, Form] = {
        **{name: AdapterFactors(place, dtype) for name, place in factors.items()},
        **{name: AdapterTensor(place) for name, place in held_whole.items()},
    }
    held = [t for t in tensors if t.name in merged or t.name in forms or _is_compared(t)]
    tables = (Role.EMBEDDING, Role.OUTPUT)
    vocabulary = [f.module for n, f in factors.items() if merged[n].tensor.info.role in tables]
    notes = [who_loads_it(factors.values(), held_whole.values(), vocabulary, form)]
    notes += filter(None, [naming.note])
    by_rule: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in tensors:
        if tensor.merge is None and tensor.changed_by_experts:
            by_rule[tensor.rule].append(tensor.name)
    notes += [left_out(names, f"by the rule '{rule}'") for rule, names in by_rule.items()]
    return Formed(
        tuple(_with_form(t, forms.get(t.name, Unwritten()), merged.get(t.name)) for t in held),
        tuple(notes),
        frozenset(name for name, item in merged.items() if item.thin and name not in held_whole),
        tuple(naming.of(tensor) for tensor in tensors if tensor.output.module is None),
    )


def _refuse_modules(tensors: Sequence[TensorPlan]) -> None:
    """Raise if tensors in folders of modules would be merged: an adapter only has the transformer."""
    for tensor in tensors:
        module = tensor.output.module
        if module is not None and tensor.merge and tensor.changed_by_experts:
            raise InputError(
                f"'{tensor.name}' is of a module of sentence-transformers, and an adapter has no place for "
                f"it: merge to a full model ({Hint('form', 'model')}), or leave the module to the base "
                f"with {rules_for(f'{module.prefix}*')}"
            )


def _is_compared(tensor: TensorPlan) -> bool:
    """Return whether the experts' tensors are compared with the base's, and some expert has the tensor."""
    copy = tensor.operation
    return isinstance(copy, Copy) and copy.compared and bool(tensor.operands or copy.reshaped)


def _with_form(tensor: TensorPlan, form: Form, merged: _Merged | None) -> TensorPlan:
    """Return a tensor with its form; its base is read only if the result or the updates need it."""
    needed = form.holds_weights or merged is None or merged.needs_base
    return replace(tensor, form=form, base=tensor.base if needed else None)


def _in_lora_file(place: AdaptedTensor, tensor: TensorPlan, names: LoraNames) -> AdaptedTensor:
    if place.embedding or place.transposed:
        raise RecipeError(
            f"'{tensor.name}': a file of {names.form}'s form has linear layers and convolutions alone: "
            f"write PEFT's ({Hint('form', 'peft')}), or leave it to the base by a rule"
        )
    return replace(place, name=names.of(tensor), form=names.form)


def left_out(names: Sequence[str], why: str) -> str:
    """Return a note that tensors are not in an adapter."""
    more, are = ", ..." if len(names) > 1 else "", counted(len(names), "tensor is", "tensors are")
    return f"{are} not in the adapter ('{names[0]}'{more}): {why}"


def _dtype(
    recipe: Recipe, tensors: Sequence[TensorPlan], experts: Mapping[str, Checkpoint]
) -> torch.dtype:
    """Return the dtype of the factors: the recipe's, else the widest dtype of the adapters or the base."""
    if recipe.output.dtype != "base":
        return getattr(torch, recipe.output.dtype)
    stored = {header.dtype for expert in experts.values() for header in expert.low_rank.values()}
    if not stored:
        stored = {t.stored.dtype for t in tensors if t.merge}
    return reduce(torch.promote_types, stored)


class _Merged:
    """One merged tensor, with what each expert stores for it."""

    def __init__(
        self, tensor: TensorPlan, experts: Mapping[str, Checkpoint], naming: Naming, form: LoraForm
    ) -> None:
        assert tensor.merge is not None
        self.tensor = tensor
        self._form = form
        self._name = naming.of(tensor)
        self.module = self._name.rpartition(".")[0]
        self._merge = tensor.merge
        self.factors: list[FactorHeader] = []  # of adapters
        self._full: list[str] = []  # experts that have the whole tensor and no factors
        self.trained_whole = False  # by an adapter
        for expert, operand in tensor.operands.items():
            if operand.tensor is not None:
                self._take(expert, experts[expert], operand.tensor)

    def _take(self, expert: str, checkpoint: Checkpoint, stored: str) -> None:
        factors = checkpoint.low_rank.get(stored)
        # What an adapter changes without factors is never left out: trained tokens of a tied table.
        whole = isinstance(checkpoint, AdapterCheckpoint) and not self._takes_factors
        if factors is None and stored not in checkpoint.replaced and not whole:
            self._full.append(expert)
            return
        if factors is None or stored.endswith(f".{_BIAS}"):
            self.trained_whole = True
            return
        if factors.stacked or not stored.endswith(".weight"):
            raise RecipeError(
                f"'{self.tensor.name}': expert '{expert}' has factors of "
                + ("a stack of matrices" if factors.stacked else "a parameter that is no layer")
                + ", which a merged adapter does not hold: merge to a full model "
                f"({Hint('form', 'model')}), or add "
                f"{rules_for(of_all_layers(self.tensor.name))}"
            )
        self.factors.append(factors)

    @property
    def has_factors(self) -> bool:
        """Whether it becomes a layer with factors; tied weights do not, as PEFT would add factors twice."""
        if self.trained_whole:
            return False
        return bool(self.factors) or (bool(self._full) and self._takes_factors)

    @property
    def _takes_factors(self) -> bool:
        # PEFT accepts factors of convolutions too, but few programs that load its adapters do.
        windows = self._form != PEFT_FORM and len(self.tensor.stored.shape) == 4
        # The other formats have no factors of embeddings.
        tables = self._form != PEFT_FORM and self.tensor.info.role is Role.EMBEDDING
        layer = self.tensor.info.takes_factors or windows
        return layer and not self.tensor.ties and not tables

    @property
    def _is_difference(self) -> bool:
        """Whether any expert has whole weights, from which the base's are subtracted."""
        return bool(self._full) or self.trained_whole

    @property
    def needs_base(self) -> bool:
        return self._is_difference or self._merge.procedure.needs_base

    @property
    def thin(self) -> bool:
        """Whether the merge on the factors of the updates is exact."""
        layout = self._merge.layout
        divided = layout is not None and (layout.stacked or layout.parts is not None)
        if self._is_difference or divided:
            return False
        return self._merge.procedure.factored_for(self._merge.parameters)

    def as_factors(self, limit: int | None) -> AdaptedTensor:
        """Return it as a layer with factors, of rank at most `limit`."""
        name, shape = self.tensor.name, self.tensor.stored.shape
        if self._merge.writes_masks:
            raise RecipeError(
                f"'{name}': method '{self._merge.method}' makes a model per expert by masks, which "
                f"an adapter has no place for: merge to a full model ({Hint('form', 'model')})"
            )
        if limit is None and not self.thin:
            method = called(self._merge.method, self._merge.parameters)
            why = (
                f"expert '{self._full[0]}' has it whole, and no factors of it"
                if self._full
                else f"method '{method}' does not keep to the span of the updates"
            )
            raise RecipeError(
                f"'{name}': {why}, so the result has full rank. Say with {Hint('rank')} "
                "what to truncate it to, or merge to a full model"
            )
        rank = min(shape[0], prod(shape[1:]))
        if self.thin:
            rank = min(rank, sum(factor.rank for factor in self.factors))
        role = self.tensor.info.role
        return AdaptedTensor(
            name=self._name,
            shape=shape,
            rank=min(rank, limit or rank),
            embedding=role is Role.EMBEDDING or any(f.table for f in self.factors),
            transposed=role is Role.CONV1D or any(f.transposed for f in self.factors),
        )


class _Whole:
    """The tensors that the adapter holds whole.

    PEFT replaces each bias separately. For other tensors it replaces all tensors of a module, if
    the module has no modules inside. PEFT unties tied tensors, so that each of their modules gets a
    copy.
    """

    def __init__(self, tensors: Sequence[TensorPlan], naming: Naming, adapted: set[str]) -> None:
        self._naming = naming
        self._adapted = adapted
        self._pieces = Counter(tensor.info.parameter for tensor in tensors)
        # Tensors of each module, with those of modules inside it and those that are tied to them.
        self._inside: defaultdict[str, list[tuple[str, TensorPlan]]] = defaultdict(list)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        for tensor in tensors:
            for parameter in (tensor.info.parameter, *tensor.ties):
                for module in _modules_around(parameter):
                    self._inside[module].append((parameter, tensor))
        self._modules: set[str] = set()
        self._biases: set[str] = set()

    def add(self, tensor: TensorPlan, *, must: bool) -> None:
        """Hold a tensor if the adapter has a place for it; raise if it has none and `must` is set."""
        if tensor.info.parameter.endswith(f".{_BIAS}"):
            self._biases.add(tensor.name)
            return
        modules = {name.rpartition(".")[0] for name in (tensor.info.parameter, *tensor.ties)}
        if self._pieces[tensor.info.parameter] == 1 and all(map(self._can_be_replaced, modules)):
            self._modules |= modules
        elif must:
            raise TensorError(
                f"'{tensor.name}': an expert trained it whole, and an adapter has no place for it. "
                "Merge to a full model, or add "
                f"{rules_for(of_all_layers(tensor.name))} (or head, to keep it per expert)."
            )

    def places(self) -> dict[str, WholeTensor]:
        names: defaultdict[str, list[str]] = defaultdict(list)
        for module in sorted(self._modules):
            for parameter, tensor in self._inside[module]:
                names[tensor.name].append(parameter)
        for name in sorted(self._biases):
            bias = self._tensors[name].info.parameter
            if bias not in names[name]:
                names[name].insert(0, bias)
        return {name: self._place(self._tensors[name], held) for name, held in names.items()}

    def _place(self, tensor: TensorPlan, held: Sequence[str]) -> WholeTensor:
        modules = [parameter.rpartition(".")[0] for parameter in held]
        first = self._naming.module(modules[0])
        return WholeTensor(
            names=tuple(self._naming.parameter(parameter) for parameter in held),
            stored=tensor.output,
            modules=tuple(self._naming.module(m) for m in modules if m in self._modules),
            beside_factors=first in self._adapted,
        )

    def _can_be_replaced(self, module: str) -> bool:
        held = [parameter.rpartition(".") for parameter, _ in self._inside[module]]
        alone = all(owner == module for owner, _, _ in held)
        # PEFT replaces no lists: of numbered parameters, or what torch keeps of a parametrised weight.
        numbered = any(leaf.isdecimal() for _, _, leaf in held)
        parametrised = module.split(".")[-2:-1] == ["parametrizations"]
        listed = numbered or parametrised
        return alone and not listed and self._naming.module(module) not in self._adapted


def _modules_around(parameter: str) -> Iterator[str]:
    module = parameter
    while module:
        module = module.rpartition(".")[0]
        yield module
