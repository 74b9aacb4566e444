"""`covmerge convert`: a file of weights as safetensors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from covmerge.errors import InputError
from covmerge.front.cli import options
from covmerge.front.cli.console import printable, say, stdout


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A pickled module, or another file of weights.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="File to write.")],
    overwrite: options.Overwrite = False,
) -> None:
    """Turn a pickled module into safetensors; nothing that it names is imported or run.

    covmerge convert nonlinear_finetuned.pt mnist.safetensors
    """
    from safetensors import torch as safetensors_torch

    from covmerge import open_checkpoint
    from covmerge.plan.recipe import format_size

    if out.exists() and not overwrite:
        raise InputError(f"the output {out} exists: pass --overwrite, or choose another name")
    with closing(open_checkpoint(file)) as checkpoint:
        for note in checkpoint.notes:
            say("note", note)
        tensors = {name: checkpoint.read(name) for name in checkpoint.headers}
    saving: Any = safetensors_torch  # its annotations are partial
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.partial")
    try:
        saving.save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    size = format_size(sum(tensor.nbytes for tensor in tensors.values()))
    stdout().print(printable(f"{out}: {len(tensors)} tensors, {size}"), soft_wrap=True)
