"""The public functions, which take a recipe or plain arguments and return one merged model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from covmerge.base.errors import RecipeError, did_you_mean
from covmerge.base.settings import FLAGS
from covmerge.files.checkpoints.open import HELD_ADAPTER, HELD_MODEL
from covmerge.files.checkpoints.staging import destination_of, output_path
from covmerge.front.job import Job
from covmerge.front.keywords import (
    AlignKeywords,
    CompareKeywords,
    ExtractKeywords,
    MergeKeywords,
    RunKeywords,
    SearchKeywords,
    takes,
)
from covmerge.front.reporting.data import Report
from covmerge.front.reporting.job import ReportJob
from covmerge.maths.methods import registry
from covmerge.maths.methods.registry import Kernel
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import Recipe, lay_over, parse_recipe, read_call
from covmerge.plan.recipe.search import Template
from covmerge.run.comparison import CompareJob, Comparison, Wanted
from covmerge.run.engine.budget import MemoryPlan
from covmerge.run.engine.executors import run_options
from covmerge.run.engine.options import RunOptions
from covmerge.run.inspection.job import InspectJob, SpectraOf
from covmerge.run.inspection.result import Inspection
from covmerge.run.result import MergedFolder, MergedTensors, MergeResult
from covmerge.run.scoring.scorer import AnyScorer, scorer_of
from covmerge.run.search.job import SearchJob
from covmerge.run.search.result import Search
from covmerge.run.sources import Source, open_recipe

_BY_FLAG = {flag: name for name, flag in FLAGS.items()}


# Without `out`, a call fits both overloads; the first one counts.
@overload
def merge(  # pyright: ignore[reportOverlappingOverload]
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    method: str | Kernel = "",
    out: None = None,
    **options: Unpack[MergeKeywords],
) -> MergedTensors: ...
@overload
def merge(
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    method: str | Kernel = "",
    out: str | Path = ...,
    **options: Unpack[MergeKeywords],
) -> MergedFolder: ...
@takes(MergeKeywords)
def merge(
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    method: str | Kernel = "",
    out: str | Path | None = None,
    **options: Unpack[MergeKeywords],
) -> MergeResult:
    """Merge experts of one base into one model.

    W̄ = W₀ + (Σ Δ_t C_t)(Σ C_t + P)⁻¹ per linear layer, with the method's C_t and P.

    Args:
        base: folder, file, remote address (`s3://…`), Hub id `org/name@revision`, state dict or
            torch module.
        experts: sources by name, or a sequence (then named expert1, expert2, ...).
        method: a name from `covmerge.methods.names()`, with parameters if wanted:
            `ties(density=0.3)`; or a function or class `(LinearGroup, *, parameters) -> Merged`,
            which is registered under its own name. Without a method it is `average` of one expert
            alone, which is added to its base, and `auto` of several.
        out: output folder, also `s3://` or `gs://`; None keeps the result in memory.
        **options: the keywords of `MergeKeywords`, and the method's parameters.

    Returns:
        `MergedTensors` without `out`, or `MergedFolder` with it.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.

    Example:
        >>> import torch
        >>> base = {"fc.weight": torch.zeros(2, 2)}
        >>> experts = {"a": {"fc.weight": torch.eye(2)}, "b": {"fc.weight": 3 * torch.eye(2)}}
        >>> merge(base, experts, method="average").tensors["fc.weight"].tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    if isinstance(cast("object", out), Mapping):
        raise _as_keywords(cast("Mapping[str, Any]", out), "the mapping after the method")
    if out is None and (isinstance(method, Path) or (isinstance(method, str) and "/" in method)):
        raise RecipeError(
            f"the method is {str(method)!r}, which reads like a folder: pass it as out={str(method)!r}"
        )
    named_method = registry.name_of(method)
    settings, params = _divided(read_call(named_method)[0], options)
    method, params = read_call(named_method, params)
    named = _named(experts)
    recipe = _recipe(
        base, named, settings | ({"method": method} if method else {}) | {"parameters": params}
    )
    target = None if out is None else destination_of(output_path(out))
    job = Job(recipe, target, run_options(settings))
    with open_recipe(recipe, base, named) as checkpoints:
        return job.run(checkpoints)


@takes(ExtractKeywords)
def extract(
    base: Source,
    expert: Source,
    out: str | Path,
    rank: int,
    *,
    form: Literal["adapter", "kohya", "diffusers"] = "adapter",
    whole: bool = False,
    **options: Unpack[ExtractKeywords],
) -> MergedFolder:
    """Turn a full fine-tune into an adapter: the best approximation of its rank, layer by layer.

    BA = Σ_{i ≤ rank} σ_i u_i v_iᵀ of Δ = W − W₀ `(d_out, d_in)`, with B `(d_out, rank)` and A
    `(rank, d_in)` (Eckart–Young). The loss of each layer, and the changes outside the layers, are
    in `stats` and in `covmerge.json`.

    Args:
        base: folder, file, remote address (`s3://…`), Hub id `org/name@revision`, state dict or
            torch module.
        expert: the model that was fine-tuned from the base.
        out: folder to write.
        rank: rank of every layer's update.
        form: `adapter` for PEFT; `kohya` or `diffusers` for a LoRA file of a part of a diffusion model.
        whole: also store the expert's changes outside its layers (norms, biases, tied embeddings).
        **options: the keywords of `ExtractKeywords`.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.

    Example:
        >>> from tempfile import mkdtemp
        >>> import torch
        >>> base = {"fc.weight": torch.zeros(4, 4)}
        >>> expert = {"fc.weight": torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0]))}
        >>> result = extract(base, expert, Path(mkdtemp()) / "lora", rank=2)
        >>> round(result.stats["totals"]["discarded_energy"], 4)
        0.0714
    """
    _check_known("extract", ExtractKeywords, options)
    return merge(
        base,
        {"expert": expert},
        "average",  # the average of one expert is that expert
        out,
        form=form,
        rank=rank,
        whole=whole,
        **options,
    )


@takes(CompareKeywords, CompareJob)
def compare(
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    methods: str | Sequence[Wanted] = "all",
    out: str | Path | None = None,
    *,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Unpack[CompareKeywords],
) -> Comparison:
    """Merge by many methods while reading the inputs once, and report how the results differ.

    Every task vector is read once for all methods; see `merge` for the arguments that both have.
    A `score` may also be a function of a model's folder. It returns a number, or for each task a number
    or a list with one number for each example. Scores are kept in `out`, except those of a function. A
    model that cannot be scored is in `scores.failed`, with a Python warning.

    Args:
        base: folder, file, remote address (`s3://…`), Hub id `org/name@revision`, state dict or
            torch module.
        experts: sources by name, or a sequence.
        methods: methods as in `merge`, or pairs of a method and its parameters; a method may occur
            several times with different parameters. `all`: every method that can run on the inputs.
        out: folder for the models, with one subfolder for each; None writes no models and only
            compares.
        parameters: parameters by method, for methods that are not to run with their defaults.
        **options: the keywords of `CompareKeywords`.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.

    Example:
        >>> import torch
        >>> base = {"fc.weight": torch.zeros(2, 2)}
        >>> experts = [{"fc.weight": torch.eye(2)}, {"fc.weight": 3 * torch.eye(2)}]
        >>> rows = compare(base, experts, ["average", "actmat"]).rows
        >>> [(row.method, round(row.norm, 3)) for row in rows]
        [('average', 2.828), ('actmat', 3.96)]
    """
    _check_known("compare", CompareKeywords, options)
    named = _named(experts)
    recipe = _recipe(base, named, options)
    score = options.get("score")
    job = CompareJob(
        recipe=recipe,
        methods=methods,
        parameters=parameters or {},
        out=None if out is None else output_path(out).expanduser(),
        scorer=None if score is None else scorer_of(score),
        options=run_options(options),
        **_fields_of(CompareJob, options),
    )
    with open_recipe(recipe, base, named) as checkpoints:
        found = job.run(checkpoints)
    failed = {} if found.scores is None else dict(found.scores.failed)
    for label, why in failed.items():
        warnings.warn(f"{label} was not scored: {why}", stacklevel=2)
    return found


@takes(SearchKeywords, SearchJob)
def search(
    recipe: str | Path | Mapping[str, Any],
    score: AnyScorer,
    out: str | Path,
    **options: Unpack[SearchKeywords],
) -> Search:
    """Choose the values that a recipe marks with `{search: [0, 1.5]}`, by a score.

    Args:
        recipe: a recipe file, or a mapping with the content of one.
        score: as in `compare`; more is better.
        out: folder for the record, the table, the best recipe and its model.
        **options: the keywords of `SearchKeywords`.

    Raises:
        InputError: anything wrong with the inputs.
        CheckFailed: nothing could be scored.

    Example:
        >>> from tempfile import mkdtemp
        >>> import torch
        >>> from safetensors.torch import load_file, save_file
        >>> files = {n: Path(mkdtemp()) / f"{n}.safetensors" for n in ("base", "a", "b")}
        >>> for value, file in enumerate(files.values()):
        ...     save_file({"fc.weight": torch.full((2, 2), float(value))}, file)
        >>> recipe = {
        ...     "base": str(files["base"]),
        ...     "experts": {"a": str(files["a"]), "b": str(files["b"])},
        ...     "method": "task_arithmetic",
        ...     "parameters": {"scale": {"search": [0.25, 0.5, 1.0]}},
        ... }
        >>> def near_three(model):
        ...     return -float((load_file(model / "model.safetensors")["fc.weight"] - 3).abs().max())
        >>> found = search(recipe, near_three, Path(mkdtemp()) / "found", trials=6)
        >>> dict(found.best.chosen)
        {'parameters.scale': 1.0}
    """
    _check_known("search", SearchKeywords, options)
    if "objectives" in options:
        options["objectives"] = _listed("objectives", options["objectives"])
    job = SearchJob(
        Template.of(recipe),
        scorer_of(score),
        output_path(out).expanduser(),
        options=run_options(options),
        **_fields_of(SearchJob, options),
    )
    return job.run()


@takes(AlignKeywords)
def inspect(
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    *,
    spectra: SpectraOf = "some",
    **options: Unpack[AlignKeywords],
) -> Inspection:
    """Analyse experts before merging: do they fit, what did they change, where do they conflict?

    Reads every tensor once, in bounded memory, and merges nothing. If something cannot be merged,
    this is a finding of the result, not an error. γ is that of ACE (Eq. 7).

    Args:
        base: folder, file, remote address (`s3://…`), Hub id `org/name@revision`, state dict or
            torch module.
        experts: sources by name, or a sequence.
        spectra: of which matrices to compute singular values, for ranks and overlaps (most of the
            work): all; some, evenly chosen, where all would take long; or none.
        **options: the keywords of `AlignKeywords`.

    Raises:
        InputError: a source that cannot be opened.

    Example:
        >>> import torch
        >>> base = {"fc.weight": torch.eye(4)}
        >>> found = inspect(base, {"a": {"fc.weight": 1.5 * torch.eye(4)}, "b": base})
        >>> found.matrices[0].relative, [finding.text[:15] for finding in found.faults]
        ({'a': 0.5, 'b': 0.0}, ['equals the base'])
    """
    _check_known("inspect", AlignKeywords, options)
    named = _named(experts)
    job = InspectJob(
        recipe=_recipe(base, named, options), spectra=spectra, options=run_options(options)
    )
    with open_recipe(job.recipe, base, named) as checkpoints:
        return job.run(checkpoints)


@takes(RunKeywords)
def report(
    out: str | Path,
    *,
    spectra: SpectraOf = "some",
    merged: MergeResult | None = None,
    **options: Unpack[RunKeywords],
) -> Report:
    """Report what a merge did, layer by layer, by reading its output, its base and its experts again.

    Args:
        out: an output of covmerge; its manifest says where its sources are.
        spectra: of which matrices to compute singular values; see `inspect`.
        merged: the result of the merge that wrote the output, to show its times too.
        **options: the keywords of `RunKeywords`.

    Raises:
        InputError: the folder is not an output of covmerge, or a source no longer exists.
    """
    _check_known("report", RunKeywords, options)
    job = ReportJob(
        folder=output_path(out),
        spectra=spectra,
        options=run_options(options),
        seconds={} if merged is None else merged.seconds,
        measured={} if merged is None else merged.run,
    )
    return job.run()


@overload
def run_recipe(recipe: Recipe, out: None, options: RunOptions | None = None) -> MergedTensors: ...
@overload
def run_recipe(recipe: Recipe, out: Path, options: RunOptions | None = None) -> MergedFolder: ...
def run_recipe(recipe: Recipe, out: Path | None, options: RunOptions | None = None) -> MergeResult:
    """Merge by a recipe; see `merge`."""
    target = None if out is None else destination_of(out)
    job = Job(recipe, target, options or RunOptions())
    with open_recipe(recipe) as checkpoints:
        return job.run(checkpoints)


def plan_recipe(recipe: Recipe, options: RunOptions | None = None) -> tuple[Plan, MemoryPlan]:
    """Plan the merge of a recipe without reading a tensor: the dry run.

    Raises:
        InputError: any error that would stop the merge before its first tensor.
    """
    with open_recipe(recipe) as checkpoints:
        options = options or RunOptions()
        plan, _ = checkpoints.plan(recipe)
        return plan, options.memory([plan])


def _recipe(base: Source, experts: Mapping[str, Source], settings: Mapping[str, Any]) -> Recipe:
    """Return the arguments of a public function as the recipe that is recorded."""
    nothing = {name for name in ("weights", "statistics", "tensors") if settings.get(name) is None}
    fields = {name: _plain(value) for name, value in settings.items() if name not in nothing}
    for name in {"before", "after", "allow", "keep", "rules"} & fields.keys():
        fields[name] = _listed(name, fields[name])
    if "rules" in fields:
        fields["rules"] = [_named_method(rule) for rule in fields["rules"]]
    if "weights" in fields:
        fields["weights"] = _named_weights(fields["weights"], tuple(experts))
    if "statistics" in fields:
        fields["statistics"] = _files(fields["statistics"])
    sources = {
        name: {"source": _label(f"expert '{name}'", source)} for name, source in experts.items()
    }
    start = {"base": _label("the base", base), "experts": sources}
    return parse_recipe(lay_over(start, fields), origin="arguments")


def _divided(method: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options into keywords of `merge` and parameters of the method."""
    keywords = MergeKeywords.__annotations__
    params = {name: value for name, value in options.items() if name not in keywords}
    # If no method is given, a parameter that the chosen method does not have is refused later.
    methods = [registry.get(method)] if method else list(registry)
    known = {parameter.name for one in methods for parameter in one.parameters}
    for name in sorted(params):
        meant = _BY_FLAG.get(name.rstrip("_"))
        if meant in keywords and not (method and name in known):
            raise RecipeError(f"merge takes no '{name}'. Did you mean '{meant}'?")
    for name in sorted(params.keys() - known):
        if name in ("parameters", "params", "kwargs", "set") and isinstance(params[name], Mapping):
            raise _as_keywords(params[name], f"{name}=")
        if name in Recipe.model_fields:
            raise RecipeError(
                f"merge takes no '{name}', which recipes have: pass the same as a mapping to "
                "covmerge.parse_recipe, and what that returns to covmerge.run_recipe"
            )
        if name.startswith("out") and re.search("dir|folder|path", name):
            raise RecipeError(f"merge takes no '{name}'. Did you mean 'out'?")
        near = get_close_matches(name, [*keywords, *known], n=1)
        if near and near[0] in keywords:
            raise RecipeError(f"merge takes no '{name}'. Did you mean '{near[0]}'?")
    return {name: value for name, value in options.items() if name in keywords}, params


def _as_keywords(given: Mapping[str, Any], there: str) -> RecipeError:
    pairs = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return RecipeError(f"merge takes parameters as keywords: pass {pairs} in place of {there}")


def _fields_of(job: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that keywords give to the fields of a job."""
    return {each.name: options[each.name] for each in fields(job) if each.name in options}


def _check_known(function: str, keywords: type[Any], options: Mapping[str, Any]) -> None:
    """Raise an error for unknown keywords, which would be ignored, from callers without a type checker."""
    known = keywords.__annotations__
    for name in options:
        if name in known:
            continue
        of_method = any(name == each.name for method in registry for each in method.parameters)
        if function == "compare" and of_method:
            raise RecipeError(
                f"compare takes no '{name}': write it with its method, as in 'NAME({name}=VALUE)'"
            )
        raise RecipeError(f"{function} takes no '{name}'.{did_you_mean(name, known)}")


def _named_method(rule: Any) -> Any:
    """Return a rule with its method's name, if the method is given as a function."""
    if not isinstance(rule, Mapping):
        return rule
    raw = cast("Mapping[str, Any]", rule)
    return (
        {**raw, "method": registry.name_of(raw["method"])} if callable(raw.get("method")) else raw
    )


def _files(statistics: object) -> dict[str, str]:
    if not isinstance(statistics, Mapping):
        raise RecipeError(
            f"statistics is a {type(statistics).__name__}, no mapping: pass {{expert: FILE}}"
        )
    found = cast("Mapping[str, object]", statistics)
    for name, file in found.items():
        if not isinstance(file, str | PathLike):
            raise RecipeError(
                f"statistics[{name!r}] is a {type(file).__name__}: pass the file that covmerge.collect "
                "wrote"
            )
    return {name: str(file) for name, file in found.items()}


def _label(whose: str, source: Source | None) -> str:
    """Return how the recorded recipe names a source; callers without a type checker may pass None."""
    if source is None:
        raise RecipeError(
            f"{whose} is None: pass a folder, a file, org/name, a state dict or a module"
        )
    if _is_adapter(source):
        return HELD_ADAPTER
    if isinstance(source, tuple | list) or (
        isinstance(source, Mapping) and isinstance(source.get("source"), str | Path)
    ):
        raise RecipeError(
            f"{whose} is a {type(source).__name__} with more than its source: pass the source alone, and "
            "weights=, statistics= beside it"
        )
    if isinstance(source, Mapping | nn.Module):
        return HELD_MODEL
    given = cast("object", source)
    if isinstance(getattr(given, "model", None), nn.Module):
        raise RecipeError(f"{whose} is a {type(given).__name__}: pass the model in it, its `model`")
    if not isinstance(given, str | PathLike):
        raise RecipeError(
            f"{whose} is a {type(given).__name__}: pass a folder, a file, org/name, a state dict, a module "
            "or the pair of an adapter's state dict and its configuration"
        )
    return str(source)


def _is_adapter(source: Any) -> bool:
    """Return whether a source is PEFT's state dict with its configuration, also as `to_dict` gives it."""
    if not isinstance(source, tuple) or len(cast("tuple[Any, ...]", source)) != 2:
        return False
    tensors, config = cast("tuple[Any, Any]", source)
    typed = hasattr(config, "peft_type")
    if isinstance(config, Mapping):
        own = cast("Mapping[str, Any]", config)
        typed = "peft_type" in own or any(hasattr(one, "peft_type") for one in own.values())
    return isinstance(tensors, Mapping) and typed


def _listed(name: str, given: object) -> list[Any]:
    """Return a given sequence as a list; a string is refused, because it is a sequence of letters."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise RecipeError(f"{name}: {given!r} is no list: pass [{given!r}]")
    return list(cast("Iterable[Any]", given))


def _plain(value: Any) -> Any:
    """Return a value of torch or numpy as a recipe stores it: the name of a dtype, or numbers."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value.tolist() if hasattr(value, "tolist") else value


def _named(experts: Mapping[str, Source] | Sequence[Source]) -> dict[str, Source]:
    one: object = experts  # callers without a type checker may pass one source alone
    if _is_adapter(one) or isinstance(one, str | Path | nn.Module):
        raise RecipeError("experts: one alone is given: pass a list, [expert], or {name: expert}")
    if isinstance(experts, Mapping):
        if any(isinstance(value, Tensor) for value in experts.values()):
            raise RecipeError(
                "experts: a state dict is given: pass a list of them, or {name: state dict}"
            )
        return dict(experts)
    return {f"expert{number}": source for number, source in enumerate(experts, start=1)}


def _named_weights(
    weights: Mapping[str, float] | Sequence[float], names: Sequence[str]
) -> dict[str, float]:
    if isinstance(weights, Mapping):
        return dict(weights)
    if isinstance(cast("object", weights), str) or not isinstance(
        cast("object", weights), Sequence
    ):
        raise RecipeError(f"weights: {weights!r} is no list: pass one number for each expert")
    if len(weights) != len(names):
        raise RecipeError(f"{len(weights)} weights for {len(names)} experts: pass one for each")
    return dict(zip(names, weights, strict=True))
