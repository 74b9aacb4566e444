"""`covmerge convert`: a file of weights as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.errors import InputError
from covmerge.front.cli import options
from covmerge.front.cli.console import printable, stdout


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
    from covmerge.base.sizes import format_size
    from covmerge_lab.module_file import read_weights, save_weights

    if out.exists() and not overwrite:
        raise InputError(f"the output {out} exists: pass --overwrite, or choose another name")
    tensors = read_weights(file)
    save_weights(tensors, out)
    size = format_size(sum(tensor.nbytes for tensor in tensors.values()))
    stdout().print(printable(f"{out}: {len(tensors)} tensors, {size}"), soft_wrap=True)
