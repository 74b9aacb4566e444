"""From the flags of `covmerge merge` to a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from covmerge.base.errors import RecipeError
from covmerge.base.settings import UNNAMED, flag_of
from covmerge.files.stores.address import local_path
from covmerge.front.cli.console import say, say_all, stderr
from covmerge.front.cli.outcome import RECIPES
from covmerge.front.cli.progress import BytesProgress, ExamplesProgress
from covmerge.maths.methods import registry
from covmerge.plan.recipe import Recipe, lay_over, load_recipe, parse_recipe, read_call
from covmerge.plan.recipe.load import load_stages
from covmerge.plan.recipe.mergekit.reading import ImportLog
from covmerge.plan.recipe.strict_yaml import parse_yaml
from covmerge.run.engine.executors import run_options
from covmerge.run.engine.options import RunOptions

# Flags that take pairs, with an example. The values of some are YAML, as in a recipe; others are text.
_PAIRS = {
    "weights": "code=0.5",
    "statistics": "code=c.covstats.safetensors",
    "tensors": "embeddings=base",
}
# Keys of a recipe's `run`, with the names of their flags; the first three may have several values.
_OF_RUN = {
    "last": "last",
    "tokens": "tokens",
    "weights": "run_weights",
    "tokens_per_step": "tokens_per_step",
    "decay": "decay",
}
_SEVERAL = ("last", "tokens", "weights")
_NOT_SEVERAL = ("dry_run", "resume", "report", "stages", "executor", "address", "workers")
# Flags about the output: with several stages, they apply to the last one only.
_OF_OUTPUT = ("out_dtype", "form", "rank", "whole", "quantise", "keep")


def place_paths(
    first: Path | None, second: Path | None, *, experts: bool, dry_run: bool, stages: bool = False
) -> tuple[Path | None, Path | None]:
    """Return the recipe file and the output folder; None for each that is missing.

    The experts come from either a recipe or flags (`--expert`, `--run`). Without an output nothing is
    written, or there are `--stages`.
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


def read_recipe(file: Path | None, flags: Mapping[str, Any]) -> Recipe:
    """Return the recipe in the file, if there is one, with the flags applied to it.

    The flags are by the settings' names; pairs are still `NAME=VALUE`.
    """
    log = ImportLog(flags.get("lenient", False))
    of_run = _check_source(file, flags)
    said: dict[str, Any] = {"experts": {}}
    if file is not None:
        said = _said(load_recipe(file, log))
    elif "run" in flags:
        said = _of_run({"folder": flags["run"], **of_run}, log)
    elif "base" not in flags:
        raise RecipeError("no base is given: pass --base SOURCE, or a recipe with `base:`")
    say_all(log.warnings, log.notes)
    return _laid_over(said, flags, file)


def _check_source(file: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Raise an error for flags that do not go together, and return the settings of a training run."""
    if file is not None and file.suffix.lower() == ".csv":
        raise RecipeError(
            f"{file} stands where a recipe is expected. --csv takes no file, and prints: leave {file} "
            f"out, and end the command with > {file}"
        )
    if file is None and flags.get("lenient"):
        raise RecipeError(
            "--lenient is about recipes of mergekit's, and none is given: leave it out"
        )
    of_run = {name: flags[flag] for name, flag in _OF_RUN.items() if flag in flags}
    if of_run and "run" not in flags:
        said = next(iter(of_run)).replace("_", "-")
        raise RecipeError(
            f"--{said} is of the checkpoints of a training run: say --run DIR, or write it into "
            "the recipe's `run`. The weight of one expert is --weight NAME=NUMBER"
        )
    if "run" in flags and "experts" in flags:
        raise RecipeError("--run and --expert both name experts: leave out one of them")
    return of_run


def _of_run(run: Mapping[str, Any], log: ImportLog) -> dict[str, Any]:
    """Return the fields of the recipe that averages a run's checkpoints."""
    last = run.get("last")
    if last is not None and not (last.isascii() and last.isdigit()):
        raise RecipeError(
            f"--last is '{last}': give a whole number, or several with commas between them"
        )
    given = {**run, **({} if last is None else {"last": int(last)})}
    return _said(parse_recipe({"run": given}, origin="command line", log=log))


def read_windows(flags: Mapping[str, Any]) -> dict[str, Recipe]:
    """Return several merges of a run's checkpoints, by the names of their folders; {} if there is one.

    For full models, every merge has the same checkpoints: those outside its window have the weight 0.
    """
    lists = {name: str(flags.get(_OF_RUN[name], "")).split(",") for name in _SEVERAL}
    if all(len(values) == 1 for values in lists.values()):
        return {}
    of_run, log = {"folder": flags.get("run"), **_check_source(None, flags)}, ImportLog()
    for name in _NOT_SEVERAL:
        if name in flags and (name, flags[name]) != ("workers", "1"):
            raise RecipeError(
                f"{flag_of(name)} is of one merge, and several windows are asked for: leave it out, or "
                "merge one after the other"
            )
    found: dict[str, dict[str, Any]] = {}
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        named = [
            (value if name == "weights" else f"{name}-{value}")
            for name, value in chosen.items()
            if len(lists[name]) > 1
        ]
        chosen = {name: value for name, value in chosen.items() if name in of_run}
        if "-".join(named) in found:
            raise RecipeError(f"the window {'-'.join(named)} is asked for twice: name it once")
        found["-".join(named)] = _of_run({**of_run, **chosen}, log)
    for note in dict.fromkeys(log.notes):
        say("note", note)
    longest = max(found.values(), key=lambda said: len(said["experts"]))["experts"]
    return {
        name: _laid_over(_over(said, longest, flags), flags, None) for name, said in found.items()
    }


def _over(
    said: Mapping[str, Any], longest: Mapping[str, Any], flags: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a window's recipe over the checkpoints of all windows, if its method is still `linear`."""
    if said["method"] != "linear" or "method" in flags:
        return dict(said)
    shares = {
        name: said["experts"][name].weight if name in said["experts"] else 0.0 for name in longest
    }
    experts = {name: expert.model_copy(update={"weight": 1.0}) for name, expert in longest.items()}
    return {**said, "experts": experts, "parameters": {"weight": [*shares.values()]}}


def read_stages(
    file: Path | None,
    flags: Mapping[str, Any],
    out: Path | None,
    stages: Path | None,
    *,
    report: bool,
) -> list[tuple[Path, Recipe]]:
    """Return the recipes that make an output, in order, each with its folder.

    Only recipes of mergekit have stages before the last. Flags about the output apply to the last, and a
    report belongs to one output. Recipes with a name go into the folder `stages`, the other one to `out`.
    """
    if file is None:
        if out is None or stages is not None:
            raise RecipeError(
                "--stages is the folder of several recipes in one file: leave it out, and end the command "
                "with the output folder"
            )
        return [(out, read_recipe(file, flags))]
    _check_source(file, flags)
    log = ImportLog(flags.get("lenient", False))
    found = load_stages(file, out, log, stages)
    say_all(log.warnings, log.notes)
    if len(found) == 1:
        return [(folder, _laid_over(_said(recipe), flags, file)) for folder, recipe in found]
    folders = [folder for folder, _ in found]
    for folder in folders:
        local_path(folder)
    if {"base", "weights", "statistics"} & flags.keys():
        raise RecipeError(
            f"{file} has several recipes: --base, --weight and --stats are of one, and written there"
        )
    of_stages = {name: value for name, value in flags.items() if name not in _OF_OUTPUT}
    if out not in folders and (report or flags != of_stages):
        raise RecipeError(
            f"all recipes of {file} have names, and each is an output: --out-dtype, --as, --rank, --whole, "
            "--quantise, --keep and --report are of one; leave out the `name` of the one that is meant"
        )
    *before, (last, recipe) = found
    return [
        *((folder, _laid_over(_said(fields), of_stages, file)) for folder, fields in before),
        (last, _laid_over(_said(recipe), flags, file)),
    ]


def _said(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in recipe.model_fields_set}


def _laid_over(said: Mapping[str, Any], flags: Mapping[str, Any], file: Path | None) -> Recipe:
    """Return a recipe from its fields with the flags applied."""
    data = dict(said)
    sources = pairs("--expert", flags.get("experts", ()), "code=./code").items()
    data["experts"] = {**data["experts"], **{name: {"source": source} for name, source in sources}}
    _set_method(data, flags, file)
    settings = {name: value for name, value in flags.items() if value and name not in _OF_RUN}
    for name, example in _PAIRS.items():
        read = _values if name == "weights" else pairs
        settings[name] = read(flag_of(name), flags.get(name, ()), example)
    settings["parameters"] = _values("--set", flags.get("parameters", ()), "eps=1e-5")
    method, _ = read_call(settings.get("method") or data.get("method") or "average")
    if "seed" in flags and registry.get(method).has("seed"):
        settings["parameters"]["seed"] = flags["seed"]
    return parse_recipe(lay_over(data, settings), origin="command line")


def shown_options(flags: Mapping[str, Any]) -> RunOptions:
    """Return the options of a run that shows its progress on standard error."""
    workers = flags.get("workers", "1")
    number = workers.isascii() and workers.isdigit()
    shown = {"progress": BytesProgress(stderr()), "collecting": ExamplesProgress(stderr())}
    return run_options({**flags, **shown, "workers": int(workers) if number else workers})


def method_parameters(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read `METHOD.KEY=VALUE` pairs."""
    parameters: dict[str, dict[str, Any]] = {}
    for name, value in _values("--set", given, "ace.eps=1e-5").items():
        method, dot, key = name.partition(".")
        if not dot:
            raise RecipeError(f"--set {name}: whose parameter? Write --set METHOD.{name}=VALUE")
        parameters.setdefault(method, {})[key] = value
    return parameters


def _set_method(data: dict[str, Any], flags: Mapping[str, Any], file: Path | None) -> None:
    before, now = data.get("method"), flags.get("method")
    now = now and read_call(now)[0]
    # Parameters belong to a method: another method would refuse them or give them another meaning.
    if before not in (None, UNNAMED) and now not in (None, before) and data.get("parameters"):
        dropped = ", ".join(data.pop("parameters"))
        say("note", f"--method {now} drops {before}'s parameters in {file}: {dropped}")


def _values(option: str, given: Sequence[str], example: str) -> dict[str, Any]:
    """Read pairs whose values are YAML, as in a recipe."""
    return {
        name: parse_yaml(text, f"{option} {name}")[0]
        for name, text in pairs(option, given, example).items()
    }


def pairs(option: str, given: Sequence[str], example: str) -> dict[str, str]:
    """Read `NAME=VALUE` pairs."""
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
