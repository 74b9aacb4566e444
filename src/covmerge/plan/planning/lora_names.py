"""By which names a LoRA file of Kohya's form or of diffusers' knows the layers of a base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from covmerge.base.errors import RecipeError
from covmerge.base.settings import Hint
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.adapters.layout import KOHYA_FORM
from covmerge.files.adapters.ldm_names import diffusers_name
from covmerge.files.adapters.parts import flat_name, part_of, region_of
from covmerge.files.checkpoints import Checkpoint
from covmerge.files.checkpoints.base import PEFT_FORM, LoraForm
from covmerge.plan.planning.work import TensorPlan

# What the parts of a pipeline are called in Kohya's form, and in diffusers'.
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
    """Return the form that all experts have, if they are adapters of one; else PEFT's."""
    forms: set[LoraForm] = {expert.form for expert in experts.values()}
    return forms.pop() if len(forms) == 1 else PEFT_FORM


class LoraNames:
    """Names in a file of one form: those that an expert has there, else made of the base's."""

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
        """Return the name of a tensor.

        Raises:
            RecipeError: it is of no part of a pipeline that is known.
        """
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
        """What the experts' own files call it."""
        for expert, adapter in self._adapters.items():
            stored = tensor.operands[expert].tensor if expert in tensor.operands else None
            if stored is not None:
                yield adapter.form, adapter.written_as(stored)

    def has_place(self, tensor: TensorPlan) -> bool:
        """Whether a full model's tensor is of a part of a pipeline whose layers such a file updates."""
        return self._part(region_of(tensor.name)) is not None

    def _part(self, region: str) -> tuple[str, str] | None:
        if region:
            return _REGIONS[region]
        listed = cast("list[object]", self._config.get("architectures") or [])
        known = [self._config.get("_class_name"), *listed]
        return next((_CLASSES[str(own)] for own in known if str(own) in _CLASSES), None)
