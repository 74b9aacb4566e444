"""Names of layers in a merged adapter, and in LoRA files in Kohya's or diffusers' format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

from covmerge.base.errors import RecipeError
from covmerge.base.settings import Hint
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.adapters.layout import KOHYA_FORM
from covmerge.files.adapters.parts import diffusers_name, flat_name, part_of, region_of
from covmerge.files.checkpoints.base import PEFT_FORM, Checkpoint, LoraForm
from covmerge.plan.planning.work import TensorPlan


@dataclass(frozen=True)
class Naming:
    """A translation of parameter names from the base's model to that which the adapter is loaded over."""

    # A prefix to add, such as `bert.` if the adapters' model has a head and the base has none.
    added: str = ""
    # A prefix to remove, in the opposite case. With both, one stands for the other, as if the
    # adapters' model is a part of the base; other names stay.
    removed: str = ""
    stored: bool = False  # whether names in the base's files are used instead of parameter names
    note: str = ""  # a note for the user on the choice

    def of(self, tensor: TensorPlan) -> str:
        return self.parameter(tensor.name if self.stored else tensor.info.parameter)

    def parameter(self, name: str) -> str:
        if self.added and self.removed and not name.startswith(self.removed):
            return name
        return f"{self.added}{name.removeprefix(self.removed)}"

    def module(self, name: str) -> str:
        return self.parameter(f"{name}.").removesuffix(".")


def naming_of(tensors: Sequence[TensorPlan], adapters: Mapping[str, AdapterCheckpoint]) -> Naming:
    """Return the naming that all adapters share; if they differ or there are none, the base's own."""
    pairs = list(_named_by_adapters(tensors, adapters))
    if not pairs:
        return Naming()
    for difference, stored in ((_difference, False), (_prefixes, False), (_difference, True)):
        names = [(t.name if stored else t.info.parameter, found) for t, found in pairs]
        candidates = {difference(name, found) for name, found in names}
        if any(one is not None and one[1] for one in candidates):
            candidates.discard(("", ""))  # a head beside the part
        only = candidates.pop() if len(candidates) == 1 else None
        if only is not None and _holds(Naming(*only, stored=stored), tensors, pairs):
            return Naming(*only, stored=stored)
    return Naming(
        note="the adapters name the layers in different ways, as models with and without a head do: "
        "the merged one names them as the model of the base's config.json does"
    )


def _holds(
    naming: Naming, tensors: Sequence[TensorPlan], pairs: Sequence[tuple[TensorPlan, str]]
) -> bool:
    """Return whether a naming is every adapter's, and no tensor outside their part is merged."""
    named = {tensor.name for tensor, _ in pairs}
    others = (t for t in tensors if t.merge is not None and t.name not in named)
    return all(naming.of(tensor) == found for tensor, found in pairs) and all(
        (t.name if naming.stored else t.info.parameter).startswith(naming.removed) for t in others
    )


def _named_by_adapters(
    tensors: Sequence[TensorPlan], adapters: Mapping[str, AdapterCheckpoint]
) -> Iterator[tuple[TensorPlan, str]]:
    for tensor in tensors:
        for expert, operand in tensor.operands.items():
            if operand.tensor and expert in adapters:
                yield tensor, adapters[expert].own_name(operand.tensor)


def _difference(name: str, found: str) -> tuple[str, str] | None:
    """Return the prefixes to add and to remove to turn one name into another; None: this is impossible."""
    if found.endswith(name):
        return found.removesuffix(name), ""
    if name.endswith(found):
        return "", name.removesuffix(found)
    return None


def _prefixes(name: str, found: str) -> tuple[str, str]:
    """Return the prefixes to add and to remove, of names that end alike from a dot on."""
    one, other = name.split("."), found.split(".")
    ends = takewhile(
        lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False)
    )
    alike = sum(1 for _ in ends)
    rests = (parts[: len(parts) - alike] for parts in (other, one))
    added, removed = ("".join(f"{part}." for part in rest) for rest in rests)
    return added, removed


# Names of the parts of a pipeline, in Kohya's and in diffusers' format.
_UNET, _TRANSFORMER = ("lora_unet_", "unet."), ("lora_transformer_", "transformer.")
_TEXT, _FIRST_TEXT = ("lora_te_", "text_encoder."), ("lora_te1_", "text_encoder.")
_SECOND_TEXT = ("lora_te2_", "text_encoder_2.")
_PARTS = (_UNET, _TRANSFORMER, _TEXT, _FIRST_TEXT, _SECOND_TEXT)
_REGIONS = {
    "model.diffusion_model.": _UNET,
    "cond_stage_model.transformer.": _TEXT,
    "conditioner.embedders.0.transformer.": _FIRST_TEXT,
}
_CLASSES = {"UNet2DConditionModel": _UNET, "CLIPTextModel": _TEXT}


def form_of(experts: Mapping[str, Checkpoint]) -> LoraForm:
    """Return the format that all experts have if they are adapters in one format, else PEFT's."""
    forms: set[LoraForm] = {expert.form for expert in experts.values()}
    return forms.pop() if len(forms) == 1 else PEFT_FORM


class LoraNames:
    """Names in a file of one format: an expert's own name in that format, or else a derived one."""

    def __init__(
        self,
        form: LoraForm,
        adapters: Mapping[str, AdapterCheckpoint],
        config: Mapping[str, Any] | None,
    ) -> None:
        self._flat = form == KOHYA_FORM
        self._adapters = adapters
        self.form = form
        self._config = config or {}

    def of(self, tensor: TensorPlan) -> str:
        written = list(self._written(tensor))
        for form, name in written:
            if form == self.form:
                return name
        region = region_of(tensor.name)
        parts = [pair for _, name in written for pair in _PARTS if part_of(name) in pair]
        part = next(iter(parts), None) or self._part(region)
        if part is None:
            raise RecipeError(
                f"'{tensor.name}': which part of a pipeline the base is, its config does not say, and no "
                f"expert's file does: a file of {self.form}'s form needs that. Write PEFT's "
                f"({Hint('form', 'peft')})"
            )
        flat, dotted = part
        inner = tensor.name.removeprefix(region)
        inner = (diffusers_name(inner) if region else None) or inner
        module = inner.removesuffix(".weight")
        return f"{flat}{flat_name(module)}.weight" if self._flat else f"{dotted}{module}.weight"

    def _written(self, tensor: TensorPlan) -> Iterator[tuple[LoraForm, str]]:
        """Yield the format and the tensor's name of each expert's own file."""
        for expert, adapter in self._adapters.items():
            stored = tensor.operands[expert].tensor if expert in tensor.operands else None
            if stored is not None:
                yield adapter.form, adapter.written_as(stored)

    def has_place(self, tensor: TensorPlan) -> bool:
        """Return whether a full model's tensor is in a part of a pipeline that such a file can update."""
        return self._part(region_of(tensor.name)) is not None

    def _part(self, region: str) -> tuple[str, str] | None:
        if region:
            return _REGIONS[region]
        listed = cast("list[object]", self._config.get("architectures") or [])
        known = [self._config.get("_class_name"), *listed]
        return next((_CLASSES[str(name)] for name in known if str(name) in _CLASSES), None)
