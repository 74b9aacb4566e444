"""`covmerge collect`: statistics of the experts' data, for the methods that use them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covmerge.cli.console import print_json, printable, say, stderr, stdout
from covmerge.cli.units import format_seconds
from covmerge.errors import InputError

if TYPE_CHECKING:
    from covmerge.statistics import Collected

_WHAT, _HOW, _ALL, _RUN = "What to collect", "How to read", "All experts at once", "Run"


def collect(
    expert: Annotated[
        str | None,
        typer.Argument(
            metavar="EXPERT",
            show_default=False,
            help="Folder of the model, or org/name@revision.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA",
            show_default=False,
            help="Its examples: .txt, .jsonl, .json or .csv.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT.covstats.safetensors", show_default=False, help="File to write."
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="gram|fisher",
            rich_help_panel=_WHAT,
            help="gram, for regmean and lot (the default), or fisher; may be given twice.",
        ),
    ] = None,
    max_examples: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_WHAT, help="Most examples to take.")
    ] = 256,
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="model|data",
            rich_help_panel=_WHAT,
            help="Whose labels the Fisher information is of; else the model's.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", rich_help_panel=_WHAT, help="Of labels that are drawn; else 0."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_HOW,
            help="Tokens that a text is cut to; else what the model takes.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", rich_help_panel=_HOW, help="Tokenizer, if the model has none."
        ),
    ] = None,
    text_column: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=_HOW, help="Column of the text.")
    ] = "text",
    pair_column: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=_HOW, help="Of a second text, if any.")
    ] = "text_pair",
    label_column: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=_HOW, help="Of the label, if any.")
    ] = "label",
    protocol: Annotated[
        str,
        typer.Option(
            metavar="inputs|regmean++",
            rich_help_panel=_ALL,
            help="regmean++ sees each block behind the merged blocks before it.",
        ),
    ] = "inputs",
    base: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", rich_help_panel=_ALL, help="Base of the experts."),
    ] = None,
    named_expert: Annotated[
        list[str] | None,
        typer.Option(
            "--expert",
            metavar="NAME=SOURCE",
            rich_help_panel=_ALL,
            help="An expert; once for each.",
        ),
    ] = None,
    named_data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="NAME=FILE", rich_help_panel=_ALL, help="Its examples; once for each."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            rich_help_panel=_ALL,
            help="Folder for NAME.covstats.safetensors of each.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_RUN, help="Examples at a time.")
    ] = 8,
    device: Annotated[
        str,
        typer.Option(metavar="cpu|cuda[:i]", rich_help_panel=_RUN, help="Where the model runs."),
    ] = "cpu",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", rich_help_panel=_RUN, help="Replace an earlier file of statistics."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_RUN, help="Print one JSON object.")
    ] = False,
) -> None:
    """Run examples through an expert and write what its layers see to a statistics file.

    covmerge collect ./code code.jsonl code.covstats.safetensors

    covmerge collect --protocol regmean++ --base B --expert code=./code
    --data code=code.jsonl ... --out DIR
    """
    from covmerge.cli.flags import pairs
    from covmerge.cli.progress import ExamplesProgress
    from covmerge.engine import usable_device
    from covmerge.statistics import collect as collect_one
    from covmerge.statistics import collect_regmean_pp

    how: dict[str, Any] = {
        "device": usable_device(device),
        "overwrite": overwrite,
        "progress": ExamplesProgress(stderr()),
        "max_examples": max_examples,
        "batch_size": batch_size,
        "max_length": max_length,
        "tokenizer": tokenizer,
        "text_column": text_column,
        "pair_column": pair_column,
        "label_column": label_column,
    }
    if protocol == "inputs":
        _refuse("regmean++", base, named_expert, named_data, folder)
        if expert is None or data is None or out is None:
            raise InputError(
                "a model, a file of examples and a file to write are needed: "
                "covmerge collect EXPERT DATA OUT.covstats.safetensors"
            )
        done = [
            collect_one(
                expert,
                data,
                out,
                kinds=kind or ("gram",),
                labels="model" if labels is None else labels,
                seed=0 if seed is None else seed,
                **how,
            )
        ]
    elif protocol == "regmean++":
        _refuse("inputs", expert, data, out, kind, labels, seed)
        if base is None or folder is None:
            raise InputError("--base SOURCE and --out FOLDER are needed for --protocol regmean++")
        experts = pairs("--expert", named_expert or (), "code=./code")
        examples = pairs("--data", named_data or (), "code=code.jsonl")
        done = list(collect_regmean_pp(base, experts, examples, folder, **how).values())
    else:
        raise InputError(f"--protocol is '{protocol}': pass inputs or regmean++")
    if as_json:
        print_json({"files": [_summary(file) for file in done]})
    else:
        _show(done)


def _refuse(protocol: str, *given: object) -> None:
    """Refuse arguments of the other protocol, rather than pass over them."""
    if any(value is not None and value != [] for value in given):
        words = {
            "inputs": "EXPERT, DATA, OUT, --kind, --labels and --seed belong to --protocol inputs",
            "regmean++": "--base, --expert, --data and --out belong to --protocol regmean++",
        }
        raise InputError(f"{words[protocol]}: leave them out, or pass --protocol {protocol}")


def _summary(file: Collected) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "examples": file.examples,
        "kinds": {
            kind: {
                "tensors": file.tensors[kind],
                "stored": file.stored[kind],
                "rows": list(file.rows[kind]),
            }
            for kind in file.tensors
        },
        "bytes": file.nbytes,
        "seconds": file.seconds,
        "notes": list(file.notes),
    }


def _show(done: Sequence[Collected]) -> None:
    from covmerge.cli.show import table
    from covmerge.recipe import format_size

    rows = table("file", "kind", "layers", "rows", "size", "time", right=("layers", "rows"))
    for file in done:
        for kind, count in file.tensors.items():
            fewest, most = file.rows[kind]
            rows.add_row(
                printable(file.path.name),
                kind,
                str(count),
                str(most) if fewest == most else f"{fewest}–{most}",
                format_size(file.nbytes),
                format_seconds(file.seconds),
            )
        for note in file.notes:
            say("note", note)
    stdout().print(rows)
