"""`covmerge extract`: a full fine-tune as an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options


def extract(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Folder, file or org/name@revision of the base.")
    ],
    expert: Annotated[
        str, typer.Argument(metavar="EXPERT", help="The model that was fine-tuned from it.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    rank: Annotated[
        int,
        options.setting("rank", options.OUTPUT, "R", min=1, help="Rank of the adapter."),
    ],
    form: Annotated[
        str,
        options.setting(
            *("form", options.OUTPUT, "adapter|kohya|diffusers"),
            help="For PEFT, or a LoRA file of a part of a diffusion model.",
        ),
    ] = "adapter",
    tensors: options.Tensors = None,
    dtype: options.Dtype = None,
    allow: options.Allow = None,
    out_dtype: options.OutDtype = None,
    whole: options.Whole = False,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    workers: options.Workers = "1",
    max_memory: options.MaxMemory = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Turn a full fine-tune into an adapter: the best one of its rank, layer by layer.

    covmerge extract ./base ./code ./code-lora --rank 32
    """
    given = options.given(locals())
    from covmerge.front.cli import flags, merging

    # Of one expert, the average is the expert.
    given |= {"experts": [f"expert={expert}"], "method": "average"}
    recipe = flags.read_recipe(None, given)
    merging.merge_to(recipe, out, flags.shown_options(given), verbose=verbose, as_json=as_json)
