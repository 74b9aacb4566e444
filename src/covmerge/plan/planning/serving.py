"""Whether PEFT and vLLM will load an adapter, by what each of them takes (docs/serving.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from covmerge.base.settings import Hint
from covmerge.base.text import counted, some
from covmerge.files.adapters.layout import KOHYA_FORM, AdaptedTensor, WholeTensor
from covmerge.files.checkpoints.base import PEFT_FORM, LoraForm

# What vLLM's --max-lora-rank may be; its default is the second.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_DEFAULT = 16


def who_loads_it(
    factors: Collection[AdaptedTensor],
    whole: Collection[WholeTensor],
    vocabulary: Collection[str] = (),
    form: LoraForm = PEFT_FORM,
) -> str:
    """Return a note on the servers that take an adapter, and on what they must be told.

    Args:
        factors: the layers that it updates.
        whole: the tensors that it replaces.
        vocabulary: modules with factors that embed tokens, or score them.
        form: of its file.

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
