"""From the flags of `covmerge merge` to a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covmerge.base.choice import UNNAMED
from covmerge.base.errors import RecipeError, did_you_mean
from covmerge.files.stores.address import local_path
from covmerge.front.cli.console import say, stderr
from covmerge.front.cli.outcome import RECIPES
from covmerge.front.cli.progress import BytesProgress, ExamplesProgress
from covmerge.maths.methods import registry
from covmerge.plan.recipe import (
    Recipe,
    dump_recipe,
    load_recipe,
    output_as,
    parse_recipe,
    parse_size,
)
from covmerge.plan.recipe.load import load_stages
from covmerge.plan.recipe.mergekit import Told
from covmerge.plan.recipe.strict_yaml import parse_yaml
from covmerge.run.comparison import Wanted
from covmerge.run.engine import AUTO, RunOptions, Workers, with_executor

_ENTRY = re.compile(r",(?![^(]*\))")  # a comma outside parentheses


@dataclass(frozen=True)
class RecipeFlags:
    """The flags that say what to merge, as given: pairs are still `NAME=VALUE`."""

    base: str | None = None
    experts: Sequence[str] = ()
    weights: Sequence[str] = ()
    run: str | None = None
    last: int | None = None
    run_weights: str | None = None
    decay: float | None = None
    statistics: Sequence[str] = ()
    base_statistics: str | None = None
    method: str | None = None
    parameters: Sequence[str] = ()
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    tensors: Sequence[str] = ()
    dtype: str | None = None
    allow: Sequence[str] = ()
    out_dtype: str | None = None
    shard_size: str | None = None
    form: str | None = None
    rank: int | None = None
    whole: bool | None = None
    quantise: str | None = None
    keep: Sequence[str] = ()
    seed: int | None = None
    lenient: bool = False


def place_paths(
    first: Path | None, second: Path | None, *, experts: bool, dry_run: bool, stages: bool = False
) -> tuple[Path | None, Path | None]:
    """Tell the recipe file from the output folder; the experts come from one recipe or from flags.

    Args:
        first: the first path given.
        second: the second path given.
        experts: whether `--expert` or `--run` was given.
        dry_run: whether nothing is written, so that the output may be left out.
        stages: whether `--stages` was given, with which it may be left out too.

    Returns:
        The recipe file and the output folder, None where there is none.

    Raises:
        RecipeError: too few paths, or two sources of experts.
    """
    if dry_run and stages:
        raise RecipeError(
            "--stages is of several recipes in a file, and --dry-run shows one: leave out one of them"
        )
    needs_out = not dry_run and not stages
    if second is not None:
        if experts:
            raise RecipeError(
                f"the recipe {first} and the flags (--expert, --run) both name experts: which of the two "
                "is meant? Leave out one of them"
            )
        return first, second
    if experts:
        if first is None and needs_out:
            raise RecipeError("no output folder is given: end the command with one")
        return None, first
    if first is not None and not needs_out:
        return first, None
    if first is not None and (first.is_file() or first.suffix in RECIPES):
        raise RecipeError(
            f"no output folder is given: covmerge merge {first} OUT (without OUT, --dry-run only)"
        )
    raise RecipeError(
        "no experts are given: pass --base SOURCE and --expert NAME=SOURCE for each, or a recipe: "
        "covmerge merge RECIPE.yml OUT; or --run DIR, to average the checkpoints of a training run"
    )


def read_recipe(file: Path | None, flags: RecipeFlags) -> Recipe:
    """Return the recipe in the file, if there is one, with the flags laid over it.

    Raises:
        CheckpointError: the checkpoints of a run are not there, or not whole.
        RecipeError: the file or a flag is wrong.
    """
    told = Told(flags.lenient)
    if file is not None and file.suffix.lower() == ".csv":
        raise RecipeError(
            f"{file} stands where a recipe is expected. --csv takes no file, and prints: leave {file} "
            f"out, and end the command with > {file}"
        )
    of_run = _given(last=flags.last, weights=flags.run_weights, decay=flags.decay)
    if file is not None:
        data = dump_recipe(load_recipe(file, told))
    elif flags.run is not None:
        given = {"run": {"folder": flags.run, **of_run}}
        data = dump_recipe(parse_recipe(given, origin="command line", told=told))
    elif flags.base is not None:
        data: dict[str, Any] = {"experts": {}}
    else:
        raise RecipeError("no base is given: pass --base SOURCE, or a recipe with `base:`")
    if of_run and flags.run is None:
        raise RecipeError(
            f"--{next(iter(of_run))} is of the checkpoints of a training run: say --run DIR, or write it "
            "into the recipe's `run`. The weight of one expert is --weight NAME=NUMBER"
        )
    if flags.run is not None and flags.experts:
        raise RecipeError("--run and --expert both name experts: leave out one of them")
    _say(told)
    return _laid_over(data, flags, file)


def read_stages(
    file: Path | None, flags: RecipeFlags, out: Path | None, stages: Path | None, *, report: bool
) -> list[tuple[Path, Recipe]]:
    """Return the recipes that make an output, in order, with the folder of each.

    Only mergekit's recipes have stages before the last. Flags on what is written are for the last.

    Args:
        file: the recipe file, if there is one.
        flags: what is laid over it.
        out: the output of the one without a name, or of all where each has one.
        stages: folder of those that have a name.
        report: whether there is to be one, which is of one output.

    Raises:
        CheckpointError: the checkpoints of a run are not there, or not whole.
        RecipeError: a file or a flag is wrong.
    """
    told = Told(flags.lenient)
    if file is None and (out is None or stages is not None):
        raise RecipeError(
            "--stages is the folder of several recipes in one file: leave it out, and end the command with "
            "the output folder"
        )
    found = [] if file is None else load_stages(file, out, told, stages)
    if out is not None and len(found) < 2:
        return [(out, read_recipe(file, flags))]
    _say(told)
    folders = [folder for folder, _ in found]
    for folder in folders:
        local_path(folder)
    if flags.base or flags.weights or flags.statistics or flags.base_statistics:
        raise RecipeError(
            f"{file} has several recipes: --base, --weight, --stats and --base-stats are of one, "
            "and written there"
        )
    of_stages = replace(
        flags, out_dtype=None, form=None, rank=None, whole=None, quantise=None, keep=()
    )
    if out not in folders and (report or flags != of_stages):
        raise RecipeError(
            f"all recipes of {file} have names, and each is an output: --out-dtype, --as, --rank, --whole, "
            "--quantise, --keep and --report are of one; leave out the `name` of the one that is meant"
        )
    *before, (last, recipe) = found
    return [
        *((folder, _laid_over(dump_recipe(own), of_stages, file)) for folder, own in before),
        (last, _laid_over(dump_recipe(recipe), flags, file)),
    ]


def _say(told: Told) -> None:
    for kind, messages in (("warning", told.warnings), ("note", told.notes)):
        for message in messages:
            say(kind, message)


def _laid_over(data: dict[str, Any], flags: RecipeFlags, file: Path | None) -> Recipe:
    """Return a recipe with the flags over what it says."""
    for name, source in pairs("--expert", flags.experts, "code=./code").items():
        data["experts"][name] = {"source": source}
    for name, weight in _values("--weight", flags.weights, "code=0.5").items():
        if name not in data["experts"]:
            raise RecipeError(
                f"--weight {name}: there is no such expert." + did_you_mean(name, data["experts"])
            )
        data["experts"][name]["weight"] = weight
    for name, path in pairs("--stats", flags.statistics, "code=c.covstats.safetensors").items():
        if name not in data["experts"]:
            raise RecipeError(
                f"--stats {name}: there is no such expert." + did_you_mean(name, data["experts"])
            )
        data["experts"][name]["statistics"] = path
    _set_method(data, flags, file)
    _section(data, "parameters").update(_values("--set", flags.parameters, "eps=1e-5"))
    if flags.seed is not None and registry.get(data.get("method") or "average").has("seed"):
        _section(data, "parameters")["seed"] = flags.seed
    _section(data, "tensors").update(pairs("--tensors", flags.tensors, "embeddings=base"))
    _section(data, "output").update(
        _given(
            dtype=flags.out_dtype,
            shard_size=flags.shard_size,
            rank=flags.rank,
            whole=flags.whole,
            quantise=flags.quantise,
        )
        | ({"keep": list(flags.keep)} if flags.keep else {})
        | output_as(flags.form)
    )
    data.update(_given(base=flags.base, base_statistics=flags.base_statistics, dtype=flags.dtype))
    data.update({k: list(v) for k, v in (("before", flags.before), ("after", flags.after)) if v})
    data["allow"] = list(dict.fromkeys((*data.get("allow", ()), *flags.allow)))
    return parse_recipe(data, origin="command line")


def run_options(
    device: str,
    threads: int | None,
    max_memory: str | None,
    *,
    workers: str = "1",
    executor: str | None = None,
    address: str | None = None,
    patience: float = 120.0,
    resume: bool = False,
    overwrite: bool = False,
) -> RunOptions:
    """Return the options of a run; its progress is shown on standard error.

    Raises:
        RecipeError: a size that is none.
        InputError: an executor that is none, or does not go with the others.
    """
    options = RunOptions(
        device=device,
        threads=threads,
        workers=_workers(workers),
        max_memory=None if max_memory is None else parse_size(max_memory),
        resume=resume,
        overwrite=overwrite,
        progress=BytesProgress(stderr()),
        collecting=ExamplesProgress(stderr()),
    )
    return with_executor(options, executor, address=address, patience=patience)


def _workers(given: str) -> Workers:
    if given == AUTO:
        return AUTO
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise RecipeError(f"--workers {given!r} is neither a number of processes nor '{AUTO}'")
    return int(given)


def methods_to_compare(given: str) -> str | list[Wanted]:
    """Read `NAME,NAME(KEY=VALUE,...)`, or `all`.

    Raises:
        RecipeError: parentheses that do not match, or a value that is not KEY=VALUE.

    Example:
        >>> methods_to_compare("ties, task_arithmetic(scale=0.1)")
        ['ties', ('task_arithmetic', {'scale': 0.1})]
    """
    if given == "all":
        return given
    found: list[Wanted] = []
    for entry in _ENTRY.split(given):
        name, opened, rest = entry.strip().partition("(")
        values = [value.strip() for value in rest.removesuffix(")").split(",")] if opened else []
        if opened and (not rest.endswith(")") or "(" in rest or not all("=" in v for v in values)):
            raise RecipeError(
                f"--methods {entry.strip()!r} is not NAME(KEY=VALUE,...), such as "
                "task_arithmetic(scale=0.3)"
            )
        if name in ("", "all"):
            what = (
                "`all` stands alone"
                if name
                else "a name is missing between two commas, or at an end"
            )
            raise RecipeError(f"--methods {given!r}: {what}")
        found.append((name.strip(), _values("--methods", values, "scale=0.3")) if opened else name)
    return found


def method_parameters(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read `METHOD.KEY=VALUE` pairs.

    Raises:
        RecipeError: a pair that is not of this form.
    """
    parameters: dict[str, dict[str, Any]] = {}
    for name, value in _values("--set", given, "ace.eps=1e-5").items():
        method, dot, key = name.partition(".")
        if not dot:
            raise RecipeError(f"--set {name}: whose parameter? Write --set METHOD.{name}=VALUE")
        parameters.setdefault(method, {})[key] = value
    return parameters


def _set_method(data: dict[str, Any], flags: RecipeFlags, file: Path | None) -> None:
    before: str | None = data.get("method")
    # Parameters belong to a method: another one would refuse them, or mean something else by them.
    if (
        before not in (None, UNNAMED)
        and flags.method not in (None, before)
        and data.get("parameters")
    ):
        dropped = ", ".join(data.pop("parameters"))
        say("note", f"--method {flags.method} drops {before}'s parameters in {file}: {dropped}")
    data.update(_given(method=flags.method))


def _section(data: dict[str, Any], key: str) -> dict[str, Any]:
    return data.setdefault(key, {})


def _given(**flags: str | float | None) -> dict[str, str | float]:
    return {name: value for name, value in flags.items() if value is not None}


def _values(option: str, given: Sequence[str], example: str) -> dict[str, Any]:
    """Read pairs whose values are YAML scalars, as they would be in a recipe."""
    return {
        name: _scalar(f"{option} {name}", text)
        for name, text in pairs(option, given, example).items()
    }


def _scalar(where: str, text: str) -> Any:
    value, _ = parse_yaml(text, where)
    if isinstance(value, dict | list):
        raise RecipeError(f"{where}: {text!r} is not a single value: write it in a recipe file")
    return value


def pairs(option: str, given: Sequence[str], example: str) -> dict[str, str]:
    """Read `NAME=VALUE` pairs.

    Raises:
        RecipeError: a pair that is not of this form, or a name that is given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name or not value:
            raise RecipeError(f"{option} {text!r} is not NAME=VALUE, such as {option} {example}")
        if name in found:
            raise RecipeError(
                f"{option} gives '{name}' twice, {found[name]!r} and {value!r}: names are unique"
            )
        found[name] = value
    return found
