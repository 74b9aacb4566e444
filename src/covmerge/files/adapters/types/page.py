"""The docs' page of the adapter types that are read, generated from the readers' tables."""

from __future__ import annotations

from covmerge.files.adapters.gguf import ARCHITECTURES
from covmerge.files.adapters.types import (
    LORA_FIELDS,
    LORA_INITS,
    NOT_READ,
    OF_FILES,
    TYPES,
    WITHOUT_WEIGHTS,
)
from covmerge.files.adapters.types.layer import AdapterType

_LORA = {
    "LORA": "W + s·B·A; with `use_dora` m ⊙ V / ‖V‖ by rows of V = W + s·B·A",
    "ADALORA": "W + s·B·diag(E)·A",
}
_PAGE = """\
# What adapter types are read

Generated from the code by `python -m covmerge.files.adapters.types.page`; a test checks that it
is current.

PEFT 0.21 has {count} types, of which {read} are read. W is the base's weight `(d_out, d_in)`, and what it
becomes is what PEFT computes before it merges anything. An update that depends on the base is computed from
the base of the merge, and a note says so.

| `peft_type` | the weight becomes | depends on the base |
|---|---|---|
{types}

`trainable_token_indices` of LoRA is read as `TRAINABLE_TOKENS` is. Other fields of LoRA change
the weight too:

| field | the weight becomes | depends on the base |
|---|---|---|
{fields}

## Files by themselves

Kohya's, ComfyUI's, diffusers' and LyCORIS's files have no configuration. The scale is the alpha of the file
over the rank, or what diffusers' `lora_adapter_metadata` say. A LoKr of two whole matrices has the scale 1
there, as LyCORIS has it, and alpha / r with an `adapter_config.json`, as PEFT has it.

| algorithm | the weight becomes | depends on the base |
|---|---|---|
{files}

With `dora_scale` the weight becomes m ⊙ V / ‖V‖, V what it would be without: by rows, or by columns where
the file's vector lies so. That depends on the base.

## Other layouts

| layout | what is read |
|---|---|
| mlx-lm's folders | LoRA and DoRA of layers and embeddings, and `full`; no stacks of experts |
| folders of AdapterHub's library (`pytorch_adapter.bin`) | LoRA of layers by themselves, and (IA)³ |
| LoRA in GGUF, over a base with its `config.json` | plain numbers; {architectures}; no stacks of experts |
| Unsloth's experts | by `lora_B_layout`; where an older one has none, a note says how it was taken |

## Errors

`python -m tests.adapters.table` compares each type and layout with what its own library computes
unmerged, in float32. The largest error over the largest output was below 1e-6, in
`lab/benchmarks/results/adapter_types.json` with those of the libraries' own merges. LyCORIS 4.1.3 merges
its LoHa, and its LoKr of products, with the scale squared, and cannot load its (IA)³.

## Refused by name

| `peft_type` | why |
|---|---|
{refused}
| LORA with `alora_invocation_tokens` (aLoRA) | it acts after some tokens alone, so that it is no weight |
"""


def markdown() -> str:
    """Return the page as Markdown."""
    refused = {**NOT_READ, **WITHOUT_WEIGHTS}
    read, all_of_peft = len(_LORA) + len(TYPES), len(_LORA) + len(TYPES) + len(refused)
    rows = [
        *(
            f"| `{name}` | {text} | {'DoRA' if name == 'LORA' else 'no'} |"
            for name, text in _LORA.items()
        ),
        *(_row(f"`{name}`", kind) for name, kind in sorted(TYPES.items())),
    ]
    return _PAGE.format(
        count=all_of_peft,
        read=read,
        types="\n".join(rows),
        fields="\n".join(
            [
                *(_row(f'`init_lora_weights = "{v}"`', kind) for v, kind in LORA_INITS.items()),
                *(_row(f"`{name}`", kind) for name, kind in LORA_FIELDS.items()),
            ]
        ),
        architectures=", ".join(sorted(ARCHITECTURES)),
        files="\n".join(_row(kind.name, kind) for kind in OF_FILES),
        refused="\n".join(f"| `{name}` | {why} |" for name, why in sorted(refused.items())),
    )


def _row(name: str, kind: AdapterType) -> str:
    return f"| {name} | {kind.equation} | {'yes' if kind.needs_base else 'no'} |"


if __name__ == "__main__":
    print(markdown(), end="")
