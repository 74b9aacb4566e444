"""The public functions: a recipe or plain arguments in, one merged model out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor, nn

from covmerge.base.errors import RecipeError, did_you_mean
from covmerge.base.phrasing import told_in_python
from covmerge.files.checkpoints import destination_of
from covmerge.front.job import Job
from covmerge.front.reporting import Report, ReportJob
from covmerge.maths.methods import registry
from covmerge.maths.steps import Steps
from covmerge.plan.planning import Plan
from covmerge.plan.recipe import Recipe, output_as, parse_recipe, parse_size
from covmerge.run.comparison import CompareJob, Comparison, Wanted
from covmerge.run.engine import (
    AnyProgress,
    MemoryPlan,
    RunOptions,
    Workers,
    as_progress,
    with_executor,
)
from covmerge.run.inspection import Inspection, InspectJob, SpectraOf
from covmerge.run.result import MergedFolder, MergedTensors, MergeResult
from covmerge.run.scoring import AnyScorer, scorer_of
from covmerge.run.sources import Source, open_checkpoints, open_recipe, statistics_of

Form = Literal["model", "adapter", "peft", "kohya", "diffusers"]


# A call that says nothing of `out` fits both overloads; the first one counts.
@overload
def merge(  # pyright: ignore[reportOverlappingOverload]
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    method: str = "",
    out: None = None,
    *,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    statistics: Mapping[str, str | Path] | None = None,
    before: Steps = (),
    after: Steps = (),
    tensors: Mapping[str, str] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    allow: Sequence[str] = (),
    dtype: str = "float32",
    out_dtype: str = "base",
    shard_size: int | str = "5GB",
    form: Form = "model",
    rank: int | None = None,
    whole: bool = False,
    quantise: str = "none",
    keep: Sequence[str] = (),
    device: str = "cpu",
    threads: int | None = None,
    workers: Workers = 1,
    executor: Literal["threads", "processes", "ranks", "ray"] | None = None,
    address: str | None = None,
    patience: float = 120.0,
    max_memory: int | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: AnyProgress | None = None,
    **params: Any,
) -> MergedTensors: ...
@overload
def merge(
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    method: str = "",
    out: str | Path = ...,
    *,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    statistics: Mapping[str, str | Path] | None = None,
    before: Steps = (),
    after: Steps = (),
    tensors: Mapping[str, str] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    allow: Sequence[str] = (),
    dtype: str = "float32",
    out_dtype: str = "base",
    shard_size: int | str = "5GB",
    form: Form = "model",
    rank: int | None = None,
    whole: bool = False,
    quantise: str = "none",
    keep: Sequence[str] = (),
    device: str = "cpu",
    threads: int | None = None,
    workers: Workers = 1,
    executor: Literal["threads", "processes", "ranks", "ray"] | None = None,
    address: str | None = None,
    patience: float = 120.0,
    max_memory: int | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: AnyProgress | None = None,
    **params: Any,
) -> MergedFolder: ...
@told_in_python
def merge(
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    method: str = "",
    out: str | Path | None = None,
    *,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    statistics: Mapping[str, str | Path] | None = None,
    before: Steps = (),
    after: Steps = (),
    tensors: Mapping[str, str] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    allow: Sequence[str] = (),
    dtype: str = "float32",
    out_dtype: str = "base",
    shard_size: int | str = "5GB",
    form: Form = "model",
    rank: int | None = None,
    whole: bool = False,
    quantise: str = "none",
    keep: Sequence[str] = (),
    device: str = "cpu",
    threads: int | None = None,
    workers: Workers = 1,
    executor: Literal["threads", "processes", "ranks", "ray"] | None = None,
    address: str | None = None,
    patience: float = 120.0,
    max_memory: int | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: AnyProgress | None = None,
    **params: Any,
) -> MergeResult:
    """Merge experts of one base into one model.

    W̄ = W₀ + (Σ Δ_t C_t)(Σ C_t + P)⁻¹ per linear layer, with the method's C_t and P.

    Args:
        base: folder, file, address of one (`s3://…`), hub id `org/name@revision`, a state dict or a
            torch module.
        experts: sources by name, or a sequence (then named expert1, expert2, ...).
        method: a registered name; see `covmerge.methods.names()`. Without one it is `average` of one
            expert alone, which is added to its base, and `auto` of several.
        out: output folder, also `s3://` or `gs://`; None keeps the result in memory.
        weights: one positive number per expert, by name or in order; 1 is neutral. Of an expert that is
            alone it is the share of its update.
        statistics: statistics files by expert name, for methods that use data.
        before: steps before the method, in order: names, or `{name: {parameters}}`.
        after: steps after the method.
        tensors: what happens to tensors by kind, as under `tensors:` in a recipe.
        rules: exceptions by tensor name or role, as under `rules:` in a recipe.
        allow: faults of the experts that are not to stop the merge, as under `allow:` in a recipe.
        dtype: compute dtype, `float32` or `float64`.
        out_dtype: stored dtype of the result; `base` keeps the base's.
        shard_size: largest size of one output file.
        form: write merged weights, or one adapter of the base: in the experts' form or the one named.
        rank: largest rank of the adapter; None: exact.
        whole: have the adapter hold what full models changed outside their layers, as it is.
        quantise: quantised format of linear layers (docs/quantised.md); `same` is the base's own.
        keep: patterns of tensor names that stay plain.
        device: where the mathematics runs.
        threads: CPU threads of the mathematics; None leaves torch's setting.
        workers: processes that share the work, with the same bytes; sources and output are files. `auto`:
            as many as the work, the cores and the memory are worth.
        executor: `ranks` where several processes, which Slurm or torchrun started, call this for one
            output that they share; `ray` for a Ray cluster whose nodes share sources and output; else
            threads, or processes where there are workers.
        address: of the Ray cluster, as `ray.init` takes it; by default `RAY_ADDRESS`.
        patience: seconds for which a rank that is not heard of is taken to be there.
        max_memory: bytes the process may take; obeyed, or refused before any work.
        resume: go on with an interrupted merge to `out`.
        overwrite: replace an earlier output.
        progress: called for every finished piece of work: a function of the bytes done, the bytes in all
            and the tensor last done, a `Progress`, or a class of bars such as `tqdm.auto.tqdm`.
        **params: the method's parameters.

    Returns:
        `MergedTensors` without `out`, `MergedFolder` with it.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.

    Departs from the paper: nowhere by itself; see each method.

    Example:
        >>> import torch
        >>> base = {"fc.weight": torch.zeros(2, 2)}
        >>> experts = {"a": {"fc.weight": torch.eye(2)}, "b": {"fc.weight": 3 * torch.eye(2)}}
        >>> merge(base, experts, method="average").tensors["fc.weight"].tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    named = _named(experts)
    _check_spelling(method, params)
    recipe = _recipe(
        base,
        named,
        method=method,
        params=params,
        weights=weights,
        statistics=statistics or {},
        before=before,
        after=after,
        tensors=tensors or {},
        rules=rules,
        allow=allow,
        dtype=dtype,
        output={
            "dtype": out_dtype,
            "shard_size": shard_size,
            **output_as(form),
            "rank": rank,
            "whole": whole,
            "quantise": quantise,
            "keep": _listed("keep", keep),
        },
    )
    job = Job(
        recipe=recipe,
        out=None if out is None else destination_of(Path(out)),
        options=_options(
            device,
            threads,
            max_memory,
            workers=workers,
            executor=executor,
            address=address,
            patience=patience,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        ),
    )
    with open_checkpoints(
        base, named, statistics_of(recipe), form=recipe.output.format
    ) as checkpoints:
        return job.run(checkpoints)


@told_in_python
def extract(
    base: Source,
    expert: Source,
    out: str | Path,
    rank: int,
    *,
    form: Literal["adapter", "kohya", "diffusers"] = "adapter",
    whole: bool = False,
    tensors: Mapping[str, str] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    allow: Sequence[str] = (),
    dtype: str = "float32",
    out_dtype: str = "base",
    device: str = "cpu",
    threads: int | None = None,
    overwrite: bool = False,
    progress: AnyProgress | None = None,
) -> MergedFolder:
    """Turn a full fine-tune into an adapter: the best one of its rank, layer by layer.

    BA = Σ_{i ≤ rank} σ_i u_i v_iᵀ of Δ = W − W₀ `(d_out, d_in)`, with B `(d_out, rank)` and A
    `(rank, d_in)` (Eckart–Young). What each layer loses, and what lies outside the layers, is in
    `stats` and in `covmerge.json`.

    Args:
        base: folder, file, address of one (`s3://…`), hub id `org/name@revision`, a state dict or a
            torch module.
        expert: the model that was fine-tuned from it.
        out: folder to write.
        rank: of every layer's update.
        form: for PEFT, or a LoRA file of a part of a diffusion model.
        whole: hold what the expert changed outside its layers (norms, biases, tied embeddings) too.
        tensors: what happens to tensors by kind, as under `tensors:` in a recipe.
        rules: exceptions by tensor name or role, as under `rules:` in a recipe.
        allow: faults of the experts that are not to stop the merge, as under `allow:` in a recipe.
        dtype: compute dtype, `float32` or `float64`.
        out_dtype: stored dtype of the factors; `base` takes the base's.
        device: where the mathematics runs.
        threads: CPU threads of the mathematics; None leaves torch's setting.
        overwrite: replace an earlier output.
        progress: called for every finished piece of work; see `merge`.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.

    Departs from the paper: nowhere; it has none.

    Example:
        >>> from tempfile import mkdtemp
        >>> import torch
        >>> base = {"fc.weight": torch.zeros(4, 4)}
        >>> expert = {"fc.weight": torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0]))}
        >>> result = extract(base, expert, Path(mkdtemp()) / "lora", rank=2)
        >>> round(result.stats["totals"]["discarded_energy"], 4)
        0.0714
    """
    return merge(
        base,
        {"expert": expert},
        "average",  # of one expert, the expert
        out,
        tensors=tensors,
        rules=rules,
        allow=allow,
        dtype=dtype,
        out_dtype=out_dtype,
        form=form,
        rank=rank,
        whole=whole,
        device=device,
        threads=threads,
        overwrite=overwrite,
        progress=progress,
    )


@told_in_python
def compare(
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    methods: str | Sequence[Wanted] = "all",
    out: str | Path | None = None,
    *,
    score: AnyScorer | None = None,
    bounds: bool = False,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    statistics: Mapping[str, str | Path] | None = None,
    before: Steps = (),
    after: Steps = (),
    tensors: Mapping[str, str] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    allow: Sequence[str] = (),
    dtype: str = "float32",
    out_dtype: str = "base",
    device: str = "cpu",
    threads: int | None = None,
    workers: Workers = 1,
    max_memory: int | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: AnyProgress | None = None,
) -> Comparison:
    """Merge by many methods in one reading pass, and say how their results differ.

    Every task vector is read once for all methods; see `merge` for the arguments they share.

    Args:
        base: folder, file, address of one (`s3://…`), hub id `org/name@revision`, a state dict or a
            torch module.
        experts: sources by name, or a sequence.
        methods: names, or pairs of a name and its parameters, which may name a method several times;
            `all` for every method that can run on what is given.
        out: folder for the models, one each; None writes none and only compares.
        score: a command with `{model}` in it, `lm-eval:TASKS`, `sentence-transformers:FILE`,
            `transformers:FILE`, or a function of a model's folder. It gives a number, or by task a number
            or one number for each example; more is better. Scores are kept in `out`, but not those of a
            function.
        bounds: score the base and each expert too.
        parameters: by method, for those that are not to run at their defaults.
        weights: one positive number per expert.
        statistics: statistics files by expert name.
        before: steps before the method, in order: names, or `{name: {parameters}}`.
        after: steps after the method.
        tensors: what happens to tensors by kind.
        rules: exceptions by tensor name or role.
        allow: faults of the experts that are not to stop it.
        dtype: compute dtype.
        out_dtype: stored dtype of the results.
        device: where the mathematics runs.
        threads: CPU threads of the mathematics.
        workers: processes that share the work.
        max_memory: bytes the process may take.
        resume: take the models that lie in `out`, and score those that have no score.
        overwrite: replace an earlier output.
        progress: called for every finished piece of work; see `merge`.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.

    Departs from the paper: nowhere by itself; see each method.

    Example:
        >>> import torch
        >>> base = {"fc.weight": torch.zeros(2, 2)}
        >>> experts = [{"fc.weight": torch.eye(2)}, {"fc.weight": 3 * torch.eye(2)}]
        >>> rows = compare(base, experts, ["average", "actmat"]).rows
        >>> [(row.method, round(row.norm, 3)) for row in rows]
        [('average', 2.828), ('actmat', 3.96)]
    """
    named = _named(experts)
    recipe = _recipe(
        base,
        named,
        weights=weights,
        statistics=statistics or {},
        before=before,
        after=after,
        tensors=tensors or {},
        rules=rules,
        allow=allow,
        dtype=dtype,
        output={"dtype": out_dtype},
    )
    job = CompareJob(
        recipe=recipe,
        methods=methods,
        parameters=parameters or {},
        out=None if out is None else Path(out),
        scorer=None if score is None else scorer_of(score),
        bounds=bounds,
        options=_options(
            *(device, threads, max_memory),
            workers=workers,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        ),
    )
    with open_checkpoints(
        base, named, statistics_of(recipe), form=recipe.output.format
    ) as checkpoints:
        return job.run(checkpoints)


@told_in_python
def inspect(
    base: Source,
    experts: Mapping[str, Source] | Sequence[Source],
    *,
    spectra: SpectraOf = "some",
    tensors: Mapping[str, str] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    dtype: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    max_memory: int | str | None = None,
    progress: AnyProgress | None = None,
) -> Inspection:
    """Look at experts before they are merged: do they fit, what did they change, where do they clash?

    Reads every tensor once, in bounded memory, and merges nothing. What cannot be merged is a
    finding of the result and not an error.

    Args:
        base: folder, file, address of one (`s3://…`), hub id `org/name@revision`, a state dict or a
            torch module.
        experts: sources by name, or a sequence.
        spectra: whose singular values are taken, for ranks and overlaps, which is most of the work:
            of all matrices, of some, evenly, where all would be long, or of none.
        tensors: what a merge would do with tensors by kind.
        rules: exceptions by tensor name or role.
        dtype: compute dtype.
        device: where the mathematics runs.
        threads: CPU threads of the mathematics.
        max_memory: bytes the process may take.
        progress: called for every finished piece of work; see `merge`.

    Raises:
        InputError: a source that cannot be opened.

    Departs from the paper: nowhere by itself; γ is that of ACE (Eq. 7).

    Example:
        >>> import torch
        >>> base = {"fc.weight": torch.eye(4)}
        >>> found = inspect(base, {"a": {"fc.weight": 1.5 * torch.eye(4)}, "b": base})
        >>> found.matrices[0].relative, [finding.text[:15] for finding in found.faults]
        ({'a': 0.5, 'b': 0.0}, ['equals the base'])
    """
    named = _named(experts)
    recipe = _recipe(
        base,
        named,
        weights=None,
        statistics={},
        tensors=tensors or {},
        rules=rules,
        dtype=dtype,
        output={},
    )
    job = InspectJob(
        recipe=recipe,
        spectra=spectra,
        options=_options(device, threads, max_memory, progress=progress),
    )
    with open_checkpoints(base, named, {}) as checkpoints:
        return job.run(checkpoints)


@told_in_python
def report(
    out: str | Path,
    *,
    spectra: SpectraOf = "some",
    device: str = "cpu",
    threads: int | None = None,
    max_memory: int | str | None = None,
    progress: AnyProgress | None = None,
    merged: MergeResult | None = None,
) -> Report:
    """Say what a merge did, layer by layer: reads the output, its base and its experts again.

    Args:
        out: an output of covmerge; its sources are where its manifest says.
        spectra: whose singular values are taken; see `inspect`.
        device: where the mathematics runs.
        threads: CPU threads of the mathematics.
        max_memory: bytes the process may take.
        progress: called for every finished piece of work; see `merge`.
        merged: the merge that wrote it, whose times are shown too.

    Raises:
        InputError: not an output of covmerge, or a source that is no longer there.

    Departs from the paper: nowhere by itself.
    """
    job = ReportJob(
        folder=Path(out),
        spectra=spectra,
        options=_options(device, threads, max_memory, progress=progress),
        seconds={} if merged is None else merged.seconds,
        measured={} if merged is None else merged.run,
    )
    return job.run()


def run_inspection(job: InspectJob) -> Inspection:
    """Carry out an inspection whose sources are those of its recipe."""
    with open_recipe(job.recipe) as checkpoints:
        return job.run(checkpoints)


@overload
def run_recipe(recipe: Recipe, out: None, options: RunOptions | None = None) -> MergedTensors: ...
@overload
def run_recipe(recipe: Recipe, out: Path, options: RunOptions | None = None) -> MergedFolder: ...
def run_recipe(recipe: Recipe, out: Path | None, options: RunOptions | None = None) -> MergeResult:
    """Carry out a recipe; see `merge`."""
    target = None if out is None else destination_of(out)
    job = Job(recipe, target, options or RunOptions())
    with open_recipe(recipe) as checkpoints:
        return job.run(checkpoints)


def plan_recipe(recipe: Recipe, options: RunOptions | None = None) -> tuple[Plan, MemoryPlan]:
    """Plan a recipe without reading a tensor: the dry run.

    Raises:
        InputError: everything that would stop the merge before its first tensor.
    """
    with open_recipe(recipe) as checkpoints:
        options = options or RunOptions()
        plan, _ = checkpoints.plan(recipe)
        return plan, options.memory([plan])


def run_comparison(job: CompareJob) -> Comparison:
    """Carry out a comparison whose sources are those of its recipe."""
    with open_recipe(job.recipe) as checkpoints:
        return job.run(checkpoints)


def _recipe(
    base: Source,
    experts: Mapping[str, Source],
    *,
    method: str = "",
    params: Mapping[str, Any] | None = None,
    weights: Mapping[str, float] | Sequence[float] | None,
    statistics: Mapping[str, str | Path],
    before: Steps = (),
    after: Steps = (),
    tensors: Mapping[str, str],
    rules: Sequence[Mapping[str, Any]],
    allow: Sequence[str] = (),
    dtype: str,
    output: Mapping[str, Any],
) -> Recipe:
    """The arguments of a public function as the recipe that is recorded."""
    given = _named_weights(weights, tuple(experts))
    for name in statistics:
        if name not in experts:
            raise RecipeError(
                f"statistics for '{name}': no such expert." + did_you_mean(name, experts)
            )
    return parse_recipe(
        {
            "base": _label("the base", base),
            "experts": {
                name: {
                    "source": _label(f"expert '{name}'", source),
                    "weight": given[name],
                    "statistics": str(statistics[name]) if name in statistics else None,
                }
                for name, source in experts.items()
            },
            **({"method": method} if method else {}),
            "parameters": dict(params or {}),
            "before": _listed("before", before),
            "after": _listed("after", after),
            "tensors": dict(tensors),
            "rules": [dict(rule) for rule in rules],
            "allow": _listed("allow", allow),
            "dtype": dtype,
            "output": dict(output),
        },
        origin="arguments",
    )


def _check_spelling(method: str, params: Mapping[str, Any]) -> None:
    """Refuse what is no parameter of the method and was to be an argument of `merge`."""
    # Where none is named, what is a parameter of another than the chosen one is said later.
    methods = [registry.get(method)] if method else list(registry)
    known = {parameter.name for one in methods for parameter in one.parameters}
    arguments = [name for name in signature(merge).parameters if name != "params"]
    for name in params.keys() - known:
        near = get_close_matches(name, [*arguments, *known], n=1)
        if near and near[0] in arguments:
            raise RecipeError(f"merge takes no '{name}'. Did you mean '{near[0]}'?")


def _options(
    device: str,
    threads: int | None,
    max_memory: int | str | None,
    *,
    workers: Workers = 1,
    executor: str | None = None,
    address: str | None = None,
    patience: float = 120.0,
    resume: bool = False,
    overwrite: bool = False,
    progress: AnyProgress | None,
) -> RunOptions:
    options = RunOptions(
        device=device,
        threads=threads,
        workers=workers,
        max_memory=None if max_memory is None else parse_size(max_memory),
        resume=resume,
        overwrite=overwrite,
        progress=None if progress is None else as_progress(progress),
    )
    return with_executor(options, executor, address=address, patience=patience)


def _label(whose: str, source: Source | None) -> str:
    """How a source is written in the recipe that is recorded; callers without a type checker pass None."""
    if source is None:
        raise RecipeError(f"{whose} is None: pass a folder, a file, org/name or a state dict")
    if isinstance(source, tuple | list) or (
        isinstance(source, Mapping) and isinstance(source.get("source"), str | Path)
    ):
        raise RecipeError(
            f"{whose} is a {type(source).__name__} with more than its source: pass the source alone, and "
            "weights=, statistics= beside it"
        )
    return "<state dict>" if isinstance(source, Mapping | nn.Module) else str(source)


def _listed(name: str, given: Sequence[Any]) -> list[Any]:
    """What is given in order; a text is a sequence too, of its letters."""
    if isinstance(given, str):
        raise RecipeError(f"{name}: '{given}' is no list: pass [{given!r}]")
    return list(given)


def _named(experts: Mapping[str, Source] | Sequence[Source]) -> dict[str, Source]:
    one: object = experts  # which callers without a type checker pass by itself
    if isinstance(one, str | Path | nn.Module):
        raise RecipeError("experts: one alone is given: pass a list, [expert], or {name: expert}")
    if isinstance(experts, Mapping):
        if any(isinstance(value, Tensor) for value in experts.values()):
            raise RecipeError(
                "experts: a state dict is given: pass a list of them, or {name: state dict}"
            )
        return dict(experts)
    return {f"expert{number}": source for number, source in enumerate(experts, start=1)}


def _named_weights(
    weights: Mapping[str, float] | Sequence[float] | None, names: Sequence[str]
) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in names:
                raise RecipeError(
                    f"weight for '{name}': no such expert." + did_you_mean(name, names)
                )
        return {name: float(weights.get(name, 1.0)) for name in names}
    if len(weights) != len(names):
        raise RecipeError(f"{len(weights)} weights for {len(names)} experts: pass one for each")
    return dict(zip(names, map(float, weights), strict=True))
