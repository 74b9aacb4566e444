"""`covmerge collect`: write statistics of the experts' data, for the methods that use them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covmerge.base.errors import InputError
from covmerge.base.sizes import format_size, parse_size
from covmerge.front.cli import options
from covmerge.front.cli.console import (
    format_seconds,
    print_json,
    printable,
    say,
    stderr,
    stdout,
    table,
)

if TYPE_CHECKING:
    from covmerge.plan.statistics import Collected, Generated

_WHAT, _HOW, _RUN = "What to collect", "How to read", "Run"
_OWN = "Without data"


def collect(
    expert: Annotated[
        str | None,
        typer.Argument(
            metavar="EXPERT", show_default=False, help="Folder of the model, or org/name@revision."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA", show_default=False, help="Its examples: .txt, .jsonl, .json or .csv."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT.covstats.safetensors", show_default=False, help="File to write."
        ),
    ] = None,
    inputs: Annotated[
        str,
        options.flag(
            _OWN,
            "data|generated|random",
            "generated: what a language model writes itself, or what is drawn for an encoder; random: "
            "what is drawn, for a language model too; DATA is left out.",
        ),
    ] = "data",
    start: Annotated[
        str | None,
        options.flag(
            _OWN,
            "bos|chat|user|base",
            "What a language model goes on from: the beginning of a text (the default), its chat "
            "template where it answers an empty question, or where the user would ask; base: what --base "
            "wrote first.",
        ),
    ] = None,
    tokens: Annotated[
        int | None, options.flag(_OWN, "N", "Most that it writes a turn; else 64.", min=1)
    ] = None,
    temperature: Annotated[
        float | None, options.flag(_OWN, "T", "Of the sampling; else 1.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        options.flag(
            _WHAT,
            "gram|fisher",
            "gram, for regmean and lot (the default), or fisher; may be given twice.",
        ),
    ] = None,
    max_examples: Annotated[int, options.flag(_WHAT, "N", "Most examples to take.", min=1)] = 256,
    labels: Annotated[
        str | None,
        options.flag(
            _WHAT, "model|data", "Whose labels the Fisher information is of; else the model's."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        options.flag(_WHAT, "N", "Of labels and inputs that are drawn or written; else 0."),
    ] = None,
    max_length: Annotated[
        int | None,
        options.flag(_HOW, "N", "Tokens that a text is cut to; else what the model takes.", min=1),
    ] = None,
    tokenizer: Annotated[
        Path | None, options.flag(_HOW, "FOLDER", "Tokenizer, if the model has none.")
    ] = None,
    text_column: Annotated[
        str | None, options.flag(_HOW, "NAME", "Column of the text; else text.")
    ] = None,
    pair_column: Annotated[
        str | None, options.flag(_HOW, "NAME", "Of a second text; else text_pair.")
    ] = None,
    label_column: Annotated[
        str | None, options.flag(_HOW, "NAME", "Of the label; else label.")
    ] = None,
    base: Annotated[
        str | None,
        options.flag(
            _OWN, "SOURCE", "Base of the experts, which begins the texts of --start base."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        options.flag(
            _RUN,
            "N",
            "Examples at a time; else 8, or of texts that a model writes 32, if they fit.",
            min=1,
        ),
    ] = None,
    device: Annotated[str, options.flag(_RUN, "cpu|cuda[:i]", "Where the model runs.")] = "cpu",
    max_memory: options.MaxMemory = None,
    overwrite: Annotated[
        bool, options.flag(_RUN, None, "Replace an earlier file of statistics.", "--overwrite")
    ] = False,
    as_json: Annotated[bool, options.flag(_RUN, None, "Print one JSON object.", "--json")] = False,
) -> None:
    """Run examples through an expert and write what its layers see to a statistics file.

    covmerge collect ./code code.jsonl code.covstats.safetensors

    covmerge collect ./code code.covstats.safetensors --inputs generated

    covmerge collect ./base base.covstats.safetensors --inputs random
    """
    from covmerge.front.cli.progress import ExamplesProgress
    from covmerge.plan.statistics import collect as collect_one
    from covmerge.run.engine.devices import usable_device

    how: dict[str, Any] = {
        "device": usable_device(device),
        "max_memory": None if max_memory is None else parse_size(max_memory),
        "overwrite": overwrite,
        "progress": ExamplesProgress(stderr()),
        "max_examples": max_examples,
        "batch_size": batch_size,
        "max_length": max_length,
        "tokenizer": tokenizer,
    }
    made = {"start": start, "tokens": tokens, "temperature": temperature, "seed": seed}
    columns = {"text_column": text_column, "pair_column": pair_column, "label_column": label_column}
    how |= options.given(columns)
    examples, target = _examples(inputs, data, out, options.given(made))
    if expert is None or examples is None or target is None:
        raise InputError(_USAGE[inputs])
    done = collect_one(
        expert,
        examples,
        target,
        kinds=kind or ("gram",),
        labels="model" if labels is None else labels,
        seed=0 if seed is None else seed,
        base=base,
        **how,
    )
    if as_json:
        print_json({"files": [_summary(done)]})
    else:
        _show(done)


_USAGE = {
    "data": "a model, a file of examples and a file to write are needed: "
    "covmerge collect EXPERT DATA OUT.covstats.safetensors",
    "generated": "a model and a file to write are needed: "
    "covmerge collect EXPERT OUT.covstats.safetensors --inputs generated",
    "random": "a model and a file to write are needed: "
    "covmerge collect BASE OUT.covstats.safetensors --inputs random",
}


def _examples(
    inputs: str,
    data: Path | None,
    out: Path | None,
    made: Mapping[str, Any],
) -> tuple[Path | Generated | None, Path | None]:
    """Return the inputs of the expert, and the file to write: the second argument if there is no data."""
    from covmerge.plan.statistics import Generated

    if inputs not in _USAGE:
        raise InputError(f"--inputs is '{inputs}': pass data, generated or random")
    if inputs == "data":
        unfit = next((name for name in made if name != "seed"), None)
        if unfit is not None:
            raise InputError(f"--{unfit} belongs to --inputs generated: leave it out, or pass that")
        return data, out
    if out is not None:
        raise InputError(f"--inputs {inputs} needs no {data}: leave it out")
    if inputs == "random" and "start" in made:
        raise InputError(f"--start {made['start']} belongs to --inputs generated: leave it out")
    drawn: dict[str, Any] = {"start": "random"} if inputs == "random" else {}
    return Generated(**made, **drawn), data


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


def _show(file: Collected) -> None:
    rows = table("file", "kind", "layers", "rows", "size", "time", right=("layers", "rows"))
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
